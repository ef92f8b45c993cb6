package sentryfs

import (
	"testing"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/sentry/fsimpl/overlay"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
)

// overlayOn mounts the Sentry's own overlay with layers on e's volume and returns an env whose root it is.
func (e *env) overlayOn(data string) *env {
	e.t.Helper()
	mnt, err := e.vfs.MountAt(e.ctx, e.creds, "overlay", e.at("/merged"), overlay.Name, &vfs.MountOptions{
		GetFilesystemOptions: vfs.GetFilesystemOptions{InternalMount: true, Data: data},
	})
	e.ok(err)
	o := *e
	o.root = vfs.MakeVirtualDentry(mnt, mnt.Root())
	return &o
}

func TestOverlay(t *testing.T) {
	e := newEnv(t)
	for _, d := range []string{"/low1", "/low2", "/low2/dir", "/low2/gone", "/upper", "/work", "/merged"} {
		e.ok(e.mkdir(d, 0o755))
	}
	e.put("/low1/a", []byte("a of layer 1"))
	e.put("/low2/a", []byte("a of layer 2"))
	e.put("/low2/b", []byte("b of layer 2"))
	e.put("/low2/dir/x", []byte("x"))
	e.put("/low2/dir/y", []byte("y"))
	e.put("/low2/gone/z", []byte("z"))
	e.ok(e.setxattr("/low2/b", "user.tag", "kept"))

	// A whiteout and an opaque directory, as an image's layers have them.
	e.ok(e.mknod("/low1/gone", linux.S_IFCHR, 0, 0))

	o := e.overlayOn("lowerdir=/low1:/low2,upperdir=/upper,workdir=/work")
	o.same("/a", []byte("a of layer 1"))
	o.missing("/gone")
	// Copy-up keeps what belongs to the file.
	fd := o.mustOpen("/b", linux.O_RDWR, 0)
	o.pwrite(fd, []byte("B"), 0)
	fd.DecRef(o.ctx)
	o.same("/b", []byte("B of layer 2"))
	e.same("/upper/b", []byte("B of layer 2"))
	e.same("/low2/b", []byte("b of layer 2"))
	if v, err := e.getxattr("/upper/b", "user.tag"); err != nil || v != "kept" {
		t.Errorf("attribute after copy-up: %q, %v", v, err)
	}

	// Removal leaves whiteouts, a directory made anew is opaque.
	o.ok(o.unlink("/a"))
	o.missing("/a")
	if st := e.stat("/upper/a"); st.Mode&linux.S_IFMT != linux.S_IFCHR || st.RdevMajor != 0 || st.RdevMinor != 0 {
		t.Errorf("whiteout: %+v", st)
	}
	o.ok(o.unlink("/dir/x"))
	o.ok(o.unlink("/dir/y"))
	o.ok(o.rmdir("/dir"))
	o.ok(o.mkdir("/dir", 0o700))
	if v, err := e.getxattr("/upper/dir", "trusted.overlay.opaque"); err != nil || v != "y" {
		t.Errorf("opaque mark: %q, %v", v, err)
	}
	if got := o.ls("/dir"); len(got) != 2 {
		t.Errorf("a directory made anew lists %v", got)
	}
	o.put("/dir/new", []byte("new"))
	o.ok(o.rename("/dir/new", "/moved", 0))
	o.same("/moved", []byte("new"))
	o.ok(o.rename("/b", "/c", 0))
	o.same("/c", []byte("B of layer 2"))
	o.missing("/b")
	list := o.ls("/")
	for name, typ := range map[string]uint8{"c": linux.DT_REG, "moved": linux.DT_REG, "dir": linux.DT_DIR} {
		if list[name].Type != typ {
			t.Errorf("listing has %q as %+v", name, list[name])
		}
	}
	if len(list) != 5 {
		t.Errorf("listing: %v", list)
	}
	o.want(o.mkdir("/c/d", 0o700), unix.ENOTDIR, "mkdir below a file")
	e.ok(e.vfs.UmountAt(e.ctx, e.creds, e.at("/merged"), &vfs.UmountOptions{}))
}
