package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"gvx.dev/gvx/native/internal/image"
)

const imageUsage = `gvx-sentry image keeps root file systems for episodes.

  gvx-sentry image import [--name NAME] [--cache DIR] ARCHIVE
        bring a docker-archive, an OCI layout or a tar of one into the cache; prints one JSON line an image
  gvx-sentry image ls [--json] [--cache DIR]
  gvx-sentry image rm [--json] [--cache DIR] NAME|DIGEST...
`

// Exit codes of the image verbs, beside 0 and exitUsage.
const (
	exitFailure  = 1
	exitNotFound = 3
)

func runImage(args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		fmt.Fprint(stderr, imageUsage)
		return exitUsage
	}
	fs := flag.NewFlagSet("gvx-sentry image "+args[0], flag.ContinueOnError)
	fs.SetOutput(stderr)
	dir := fs.String("cache", "", "cache directory (default $XDG_CACHE_HOME/gvx/images)")
	name := ""
	asJSON := false
	switch args[0] {
	case "import":
		fs.StringVar(&name, "name", "", "a further name for the image")
	case "ls", "rm":
		fs.BoolVar(&asJSON, "json", false, "one JSON line an image")
	default:
		fmt.Fprintf(stderr, "gvx-sentry image: unknown command %q\n%s", args[0], imageUsage)
		return exitUsage
	}
	if err := fs.Parse(args[1:]); err != nil {
		return exitUsage
	}
	err := imageVerb(args[0], *dir, name, asJSON, fs.Args(), stdout)
	var wrong usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &wrong):
		fmt.Fprintf(stderr, "gvx-sentry image %s: %s\n%s", args[0], err, imageUsage)
		return exitUsage
	}
	fmt.Fprintf(stderr, "gvx-sentry: image %s: %s\n", args[0], strings.ReplaceAll(err.Error(), "\n", "; "))
	if errors.Is(err, image.ErrNotFound) {
		return exitNotFound
	}
	return exitFailure
}

type usageError string

func (e usageError) Error() string { return string(e) }

func imageVerb(verb, dir, name string, asJSON bool, args []string, stdout io.Writer) error {
	if dir == "" {
		var err error
		if dir, err = image.DefaultDir(); err != nil {
			return err
		}
	}
	cache, err := image.Open(dir)
	if err != nil {
		return err
	}
	var infos []image.Info
	switch verb {
	case "import":
		if len(args) != 1 {
			return usageError("needs one archive")
		}
		if infos, err = cache.Import(args[0], name); err != nil {
			return err
		}
		asJSON = true
	case "ls":
		if len(args) != 0 {
			return usageError("takes no arguments")
		}
		if infos, err = cache.List(); err != nil {
			return err
		}
	case "rm":
		if len(args) == 0 {
			return usageError("needs a name or digest")
		}
		for _, ref := range args {
			info, err := cache.Remove(ref)
			if err != nil {
				return err
			}
			infos = append(infos, info)
		}
	}
	return printImages(stdout, infos, asJSON)
}

func printImages(w io.Writer, infos []image.Info, asJSON bool) error {
	if asJSON {
		enc := json.NewEncoder(w)
		for _, i := range infos {
			if err := enc.Encode(i); err != nil {
				return err
			}
		}
		return nil
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "DIGEST\tSIZE\tNAMES")
	for _, i := range infos {
		fmt.Fprintf(t, "%.12s\t%d MB\t%s\n", i.Digest, i.Size/1_000_000, strings.Join(i.Names, ", "))
	}
	return t.Flush()
}
