// Lets seccomp.go declare a function without a body for go:linkname.
