module gvx.dev/gvx/native

go 1.26.3

require (
	github.com/erofs/go-erofs v0.3.1 // indirect
	github.com/google/go-containerregistry v0.22.1 // indirect
	github.com/klauspost/compress v1.20.4 // indirect
	github.com/opencontainers/runtime-spec v1.2.1 // indirect
	golang.org/x/sys v0.50.0 // indirect
	gvisor.dev/gvisor v0.0.0-20260905035102-160fafc42237 // indirect
)
