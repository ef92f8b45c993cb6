"""gvx: a private, unprivileged Docker for every agent episode."""

__version__ = "0.1.0"
