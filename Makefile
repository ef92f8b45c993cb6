# Two commands: `make demo` runs the main job on a fresh machine, `make test` passes the tests. Both install what is missing.

PY := .venv/bin/python
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2

.PHONY: demo test test-long setup lint lint-python lint-go test-go test-python images bench wheel clean

demo: setup
	$(PY) -m gvx.demo

test: setup lint test-go images test-python

setup:
	.ci/setup machine venv native

lint: lint-python lint-go

lint-python: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

lint-go: setup
	@unformatted=$$("$$(.ci/go env GOROOT)/bin/gofmt" -l native) && test -z "$$unformatted" || { echo "gofmt: $$unformatted"; exit 1; }
	cd native && ../.ci/go vet ./...
	cd native && ../.ci/go run $(STATICCHECK) ./...

test-go: setup
	cd native && ../.ci/go test ./...

images: setup
	$(PY) -m fixtures build all

test-python: setup images
	$(PY) -m pytest

test-long: setup images
	$(PY) -m pytest -m long

bench: setup images
	$(PY) -m benchmarks

wheel: setup
	$(PY) -m build --wheel

clean:
	rm -rf .venv build dist launcher/gvx/bin .mypy_cache .ruff_cache .pytest_cache
