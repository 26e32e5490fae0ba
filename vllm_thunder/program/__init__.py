"""Programs, turns and the scheduling policy: pure, no vLLM, no torch, no clock."""
