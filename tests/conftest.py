"""Shared set-up of all tests.

That this file is here also puts ``tests/`` on the import path: helpers among the tests are ``import overlay_samples``
and ``from conformance.host_docker import HostDocker``, for pytest and for mypy.
"""
