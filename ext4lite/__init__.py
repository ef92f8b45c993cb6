"""ext4lite: ext4 volumes and Docker's overlay2 store in one file, in pure Python, without root and without a kernel."""

__version__ = "0.1.0"
