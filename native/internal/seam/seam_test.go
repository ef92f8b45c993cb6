package seam

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"gvisor.dev/gvisor/runsc/boot"
)

// The layouts this package was written for are those of the gVisor in go.mod.
func TestCheck(t *testing.T) {
	if err := Check(); err != nil {
		t.Fatal(err)
	}
}

// A layout that changed is named in the error.
func TestCheckFieldNamesTheChange(t *testing.T) {
	err := checkField(reflect.TypeFor[boot.Loader](), "k", reflect.TypeFor[int]())
	if !errors.Is(err, ErrLayout) || !strings.Contains(err.Error(), "boot.Loader.k is *kernel.Kernel, not int") {
		t.Fatalf("got %v", err)
	}
	err = checkField(reflect.TypeFor[boot.Loader](), "kern", reflect.TypeFor[int]())
	if !errors.Is(err, ErrLayout) || !strings.Contains(err.Error(), `no field "kern"`) {
		t.Fatalf("got %v", err)
	}
}

func TestOverlayOptions(t *testing.T) {
	cwd := func() (string, error) { return "/var/lib/docker/overlay2", nil }
	none := func() (string, error) { return "", errors.New("asked for the working directory") }
	for _, c := range []struct {
		in, out string
		cwd     func() (string, error)
		fails   bool
	}{
		{in: "lowerdir=/a:/b,upperdir=/u,workdir=/w", out: "lowerdir=/a:/b,upperdir=/u,workdir=/w", cwd: none},
		{
			in:  "index=off,lowerdir=l/A:l/B,upperdir=x/diff,workdir=x/work",
			out: "lowerdir=/var/lib/docker/overlay2/l/A:/var/lib/docker/overlay2/l/B,upperdir=/var/lib/docker/overlay2/x/diff,workdir=/var/lib/docker/overlay2/x/work",
			cwd: cwd,
		},
		{in: "userxattr,metacopy=off,redirect_dir=nofollow,xino=auto,volatile,lowerdir=/a:b", out: "userxattr,lowerdir=/a:/var/lib/docker/overlay2/b", cwd: cwd},
		{in: "metacopy=on,lowerdir=/a:/b", fails: true, cwd: none},
		{in: "redirect_dir=on,lowerdir=/a:/b", fails: true, cwd: none},
		{in: "lowerdir=/a::/b", fails: true, cwd: none},
		{in: "lowerdir=a", fails: true, cwd: none},
		{in: "lowerdir=a", fails: true, cwd: func() (string, error) { return "/with,comma", nil }},
		{in: "lowerdir=a", out: "lowerdir=/a", cwd: func() (string, error) { return "/", nil }},
		{in: "unknown=1,lowerdir=/a", out: "unknown=1,lowerdir=/a", cwd: none}, // the stock type refuses it
	} {
		got, err := overlayOptions(c.in, c.cwd)
		if (err != nil) != c.fails || got != c.out {
			t.Errorf("overlayOptions(%q) = %q, %v; want %q", c.in, got, err, c.out)
		}
	}
}
