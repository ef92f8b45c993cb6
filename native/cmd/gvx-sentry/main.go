// Command gvx-sentry is the runtime of gvx: it runs one episode in an unprivileged gVisor sandbox, and keeps the images
// that episodes start from.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"

	"gvx.dev/gvx/native/internal/sandbox"
)

func init() {
	// The supervisor starts the Sentry from the main goroutine with PDEATHSIG, which follows the life of the starting
	// thread: pin it to the main thread, which lives as long as the process.
	runtime.LockOSThread()
}

const usage = `gvx-sentry runs a guest in an unprivileged gVisor sandbox.

  gvx-sentry run --spec-fd N             run the episode described by the document at descriptor N
  gvx-sentry image import|ls|rm ...      the cache of root file systems
  gvx-sentry version                     what this binary is made of
`

// exitUsage is the exit code for a wrong command line.
const exitUsage = 2

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		fmt.Fprint(stderr, usage)
		return exitUsage
	}
	switch verb := args[0]; verb {
	case "run":
		return runEpisode(args[1:], stderr)
	case "boot": // internal: started by run
		return sandbox.Boot()
	case "image":
		return runImage(args[1:], stdout, stderr)
	case "version":
		printVersion(stdout)
		return 0
	case "help", "-h", "--help":
		fmt.Fprint(stdout, usage)
		return 0
	default:
		fmt.Fprintf(stderr, "gvx-sentry: unknown command %q\n%s", verb, usage)
		return exitUsage
	}
}

func runEpisode(args []string, stderr io.Writer) int {
	fs := flag.NewFlagSet("gvx-sentry run", flag.ContinueOnError)
	fs.SetOutput(stderr)
	specFD := fs.Int("spec-fd", -1, "descriptor of the episode document")
	if err := fs.Parse(args); err != nil {
		return exitUsage
	}
	if *specFD < 0 || fs.NArg() > 0 {
		fmt.Fprintln(stderr, "gvx-sentry run: needs --spec-fd N and nothing else")
		return exitUsage
	}
	return sandbox.Supervise(*specFD)
}

func printVersion(w io.Writer) {
	fmt.Fprintf(w, "gvx-sentry, %s, episode schema %s\n", runtime.Version(), sandbox.Schema)
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if m.Path == "gvisor.dev/gvisor" {
				fmt.Fprintf(w, "gVisor %s\n", m.Version)
			}
		}
	}
}
