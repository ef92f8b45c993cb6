package main

import (
	"fmt"
	"io"
)

func runImage(args []string, stdout, stderr io.Writer) int {
	fmt.Fprintln(stderr, "gvx-sentry image: import, ls or rm")
	return exitUsage
}
