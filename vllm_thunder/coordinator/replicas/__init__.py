"""Several coordinators that share programs among them by their ids."""
