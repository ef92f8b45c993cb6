"""Shared set-up of all tests.

That this file is here also puts ``tests/`` on the import path: helpers among the tests are ``support.samples`` or
``conformance.host_docker``, for pytest and for mypy.
"""
