package sentryfs

import (
	"bytes"
	goContext "context"
	"os/exec"
	"path/filepath"
	"testing"

	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
	"gvisor.dev/gvisor/pkg/state"
)

// checkpointed is what the test below saves: a mount namespace and what a process has open.
type checkpointed struct {
	mntns *vfs.MountNamespace
	file  *vfs.FileDescription
	dir   *vfs.FileDescription
}

func (*checkpointed) StateTypeName() string { return "sentryfs.checkpointed" }

func (*checkpointed) StateFields() []string { return []string{"mntns", "file", "dir"} }

func (c *checkpointed) StateSave(s state.Sink) {
	s.Save(0, &c.mntns)
	s.Save(1, &c.file)
	s.Save(2, &c.dir)
}

func (c *checkpointed) StateLoad(_ goContext.Context, s state.Source) {
	s.Load(0, &c.mntns)
	s.Load(1, &c.file)
	s.Load(2, &c.dir)
}

func init() { state.Register((*checkpointed)(nil)) }

// A checkpoint holds open files, and a restore finds them on a copy of the volume.
func TestCheckpointAndRestore(t *testing.T) {
	e := newEnv(t)
	e.ok(e.mkdir("/d", 0o755))
	e.put("/d/file", []byte("contents"))
	saved := &checkpointed{
		mntns: e.mntns,
		file:  e.mustOpen("/d/file", linux.O_RDWR, 0),
		dir:   e.mustOpen("/d", linux.O_RDONLY|linux.O_DIRECTORY, 0),
	}
	if _, err := saved.file.Seek(e.ctx, 3, linux.SEEK_SET); err != nil {
		t.Fatal(err)
	}
	e.ok(e.vfs.PrepareSave(e.ctx))
	var b bytes.Buffer
	if _, err := state.Save(e.ctx, &b, saved); err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(t.TempDir(), "copy.ext4")
	if out, err := exec.Command("cp", e.image, image).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, fd := range []*vfs.FileDescription{saved.file, saved.dir} {
		fd.DecRef(e.ctx)
	}

	// The copy's journal must be replayed: whoever restores sees to that before the driver gets it.
	if out, err := exec.Command("e2fsck", "-fp", image).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	vol := openVolume(t, image, false)
	RegisterVolume(vol)
	var loaded checkpointed
	if _, err := state.Load(e.ctx, bytes.NewReader(b.Bytes()), &loaded); err != nil {
		t.Fatal(err)
	}
	root := loaded.mntns.Root(e.ctx)
	r := *e
	r.vfs, r.mntns, r.root, r.vol, r.image = root.Mount().Filesystem().VirtualFilesystem(), loaded.mntns, root, vol, image
	c := *e.ctx.(*testContext)
	c.mntns, c.root = r.mntns, r.root
	r.ctx = &c
	r.ok(r.vfs.CompleteRestore(r.ctx, &vfs.CompleteRestoreOptions{}))
	if got := r.pread(loaded.file, 100, 0); string(got) != "contents" {
		t.Errorf("an open file reads %q", got)
	}
	if off, err := loaded.file.Seek(r.ctx, 0, linux.SEEK_CUR); err != nil || off != 3 {
		t.Errorf("its offset is %d, %v", off, err)
	}
	r.ok(r.rename("/d/file", "/d/renamed", 0))
	if p, err := r.vfs.PathnameWithDeleted(r.ctx, r.root, loaded.file.VirtualDentry()); err != nil || p != "/d/renamed" {
		t.Errorf("path: %q, %v", p, err)
	}
	r.put("/d/new", []byte("after"))
	e.missing("/d/new") // the copy's, not the original's
	for _, fd := range []*vfs.FileDescription{loaded.file, loaded.dir} {
		fd.DecRef(r.ctx)
	}
	r.close()
}
