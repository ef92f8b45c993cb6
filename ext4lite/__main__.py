"""``python -m ext4lite``."""

from ext4lite.cli import main

main()
