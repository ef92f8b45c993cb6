package sentryfs

import (
	"bytes"
	goContext "context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/errors"
	"gvisor.dev/gvisor/pkg/fspath"
	"gvisor.dev/gvisor/pkg/refs"
	"gvisor.dev/gvisor/pkg/sentry/fsimpl/overlay"
	"gvisor.dev/gvisor/pkg/sentry/fsimpl/tmpfs"
	"gvisor.dev/gvisor/pkg/sentry/kernel/auth"
	"gvisor.dev/gvisor/pkg/sentry/ktime"
	"gvisor.dev/gvisor/pkg/sentry/limits"
	"gvisor.dev/gvisor/pkg/sentry/pgalloc"
	"gvisor.dev/gvisor/pkg/sentry/uniqueid"
	"gvisor.dev/gvisor/pkg/sentry/usage"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
	"gvisor.dev/gvisor/pkg/state"
	"gvisor.dev/gvisor/pkg/usermem"

	"gvx.dev/gvx/native/internal/blockdev"
	"gvx.dev/gvx/native/internal/ext4"
)

// env is a virtual file system of the Sentry, without the Sentry, whose root is an ext4 volume made by mke2fs. When the test
// ends the volume is closed and e2fsck judges it.
type env struct {
	t     *testing.T
	ctx   context.Context
	vfs   *vfs.VirtualFilesystem
	creds *auth.Credentials
	mntns *vfs.MountNamespace
	root  vfs.VirtualDentry
	vol   *Volume
	image string
	done  bool
}

// testContext carries what file systems ask a context for.
type testContext struct {
	context.Context
	values map[any]any
	mntns  *vfs.MountNamespace
	root   vfs.VirtualDentry
}

func (c *testContext) Value(key any) any {
	switch key {
	case vfs.CtxMountNamespace:
		if c.mntns == nil {
			return nil
		}
		c.mntns.IncRef()
		return c.mntns
	case vfs.CtxRoot:
		if !c.root.Ok() {
			return nil
		}
		c.root.IncRef()
		return c.root
	}
	if v, ok := c.values[key]; ok {
		return v
	}
	return c.Context.Value(key)
}

// nsGetter gives mount namespaces their reference counts; the Sentry's nsfs does so otherwise.
type nsGetter struct{}

func (nsGetter) GetNamespaceInode(_ context.Context, ns vfs.Namespace) refs.TryRefCounter {
	return &nsRefs{n: 1, ns: ns.(*vfs.MountNamespace)}
}

type nsRefs struct {
	n  int64
	ns *vfs.MountNamespace
}

func (r *nsRefs) IncRef() { r.n++ }

func (r *nsRefs) TryIncRef() bool { r.n++; return true }

func (r *nsRefs) DecRef(ctx context.Context) {
	if r.n--; r.n == 0 {
		r.ns.Destroy(ctx)
	}
}

func (*nsRefs) StateTypeName() string { return "sentryfs.nsRefs" }

func (*nsRefs) StateFields() []string { return []string{"n", "ns"} }

func (r *nsRefs) StateSave(s state.Sink) {
	s.Save(0, &r.n)
	s.Save(1, &r.ns)
}

func (r *nsRefs) StateLoad(_ goContext.Context, s state.Source) {
	s.Load(0, &r.n)
	s.Load(1, &r.ns)
}

func init() { state.Register((*nsRefs)(nil)) }

// global are parts that a process has once.
var global = sync.OnceValues(func() (*pgalloc.MemoryFile, error) {
	if err := usage.Init(); err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("test", 0)
	if err != nil {
		return nil, err
	}
	return pgalloc.NewMemoryFile(os.NewFile(uintptr(fd), "test"), pgalloc.MemoryFileOpts{DisableIMAWorkAround: true})
})

// makeImage makes a volume with the features gvx uses.
func makeImage(t *testing.T, size string, args ...string) string {
	t.Helper()
	image := filepath.Join(t.TempDir(), "volume.ext4")
	args = append([]string{"-q", "-F", "-t", "ext4", "-b", "4096", "-O", "metadata_csum_seed,^resize_inode,^orphan_file"}, args...)
	out, err := exec.Command("mke2fs", append(args, image, size)...).CombinedOutput()
	if err != nil {
		t.Fatalf("mke2fs: %v\n%s", err, out)
	}
	return image
}

// newEnv mounts a new volume of 64 MiB.
func newEnv(t *testing.T) *env { return openEnv(t, makeImage(t, "64M"), false) }

// openEnv mounts image.
func openEnv(t *testing.T, image string, readOnly bool) *env {
	t.Helper()
	e := mountEnv(t, openVolume(t, image, readOnly), readOnly)
	e.image = image
	return e
}

// openEnvOn mounts a delta over base. e2fsck is not run at the end: it knows no deltas.
func openEnvOn(t *testing.T, delta, base string) *env {
	t.Helper()
	return mountEnv(t, volumeOn(t, reopen(t, delta, base), false), false)
}

func mountEnv(t *testing.T, vol *Volume, readOnly bool) *env {
	t.Helper()
	e := &env{t: t, vol: vol}
	mf, err := global()
	if err != nil {
		t.Fatal(err)
	}
	e.creds = auth.NewRootCredentials(auth.NewRootUserNamespace())
	c := &testContext{Context: context.Background(), values: map[any]any{
		pgalloc.CtxMemoryFile:              mf,
		ktime.CtxRealtimeClock:             &ktime.SyntheticClock{},
		auth.CtxCredentials:                e.creds,
		limits.CtxLimits:                   limits.NewLimitSet(),
		uniqueid.CtxGlobalUniqueID:         uint64(1),
		uniqueid.CtxInotifyCookie:          uint32(1),
		uniqueid.CtxGlobalUniqueIDProvider: nil,
	}}
	delete(c.values, uniqueid.CtxGlobalUniqueIDProvider)
	e.ctx = c
	e.vfs = &vfs.VirtualFilesystem{}
	if err := e.vfs.Init(e.ctx); err != nil {
		t.Fatal(err)
	}
	e.vfs.MustRegisterFilesystemType(Name, &FilesystemType{}, &vfs.RegisterFilesystemTypeOptions{})
	e.vfs.MustRegisterFilesystemType(tmpfs.Name, &tmpfs.FilesystemType{}, &vfs.RegisterFilesystemTypeOptions{})
	e.vfs.MustRegisterFilesystemType(overlay.Name, &overlay.FilesystemType{}, &vfs.RegisterFilesystemTypeOptions{})
	e.mntns, err = e.vfs.NewMountNamespace(e.ctx, e.creds, "volume", Name, &vfs.MountOptions{
		ReadOnly:             readOnly,
		GetFilesystemOptions: vfs.GetFilesystemOptions{InternalMount: true, InternalData: e.vol},
	}, nsGetter{})
	if err != nil {
		t.Fatal(err)
	}
	e.root = e.mntns.Root(e.ctx)
	c.mntns, c.root = e.mntns, e.root
	t.Cleanup(e.close)
	return e
}

func openVolume(t *testing.T, image string, readOnly bool) *Volume {
	t.Helper()
	flags := os.O_RDWR
	if readOnly {
		flags = os.O_RDONLY
	}
	f, err := os.OpenFile(image, flags, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	dev, err := blockdev.NewFile(int(f.Fd()), readOnly)
	if err != nil {
		t.Fatal(err)
	}
	return volumeOn(t, dev, readOnly)
}

func volumeOn(t *testing.T, dev blockdev.Device, readOnly bool) *Volume {
	t.Helper()
	fs, err := ext4.Open(dev, ext4.Options{ReadOnly: readOnly, Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	return &Volume{Key: t.Name(), FS: fs, Dev: dev}
}

// close unmounts, closes the volume and has e2fsck judge it.
func (e *env) close() {
	e.t.Helper()
	if e.done {
		return
	}
	e.done = true
	c := e.ctx.(*testContext)
	c.mntns, c.root = nil, vfs.VirtualDentry{}
	e.root.DecRef(e.ctx)
	e.mntns.DecRef(e.ctx)
	if err := e.vol.FS.Close(); err != nil {
		e.t.Errorf("closing the volume: %v", err)
	}
	e.fsck()
}

func (e *env) fsck() {
	e.t.Helper()
	if e.image == "" {
		return
	}
	if out, err := exec.Command("e2fsck", "-fn", e.image).CombinedOutput(); err != nil {
		e.t.Errorf("e2fsck: %v\n%s", err, out)
	}
}

// as is a copy of e that acts for another user.
func (e *env) as(uid, gid uint32) *env {
	creds := auth.NewUserCredentials(auth.KUID(uid), auth.KGID(gid), nil, nil, e.creds.UserNamespace)
	o := *e
	o.creds = creds
	c := *e.ctx.(*testContext)
	values := make(map[any]any)
	for k, v := range c.values {
		values[k] = v
	}
	values[auth.CtxCredentials] = creds
	c.values = values
	o.ctx = &c
	return &o
}

func (e *env) at(path string) *vfs.PathOperation {
	return &vfs.PathOperation{Root: e.root, Start: e.root, Path: fspath.Parse(path)}
}

func (e *env) follow(path string) *vfs.PathOperation {
	p := e.at(path)
	p.FollowFinalSymlink = true
	return p
}

func (e *env) ok(err error) {
	e.t.Helper()
	if err != nil {
		e.t.Fatal(err)
	}
}

// want fails the test unless err is errno.
func (e *env) want(err error, errno unix.Errno, what string) {
	e.t.Helper()
	if got, ok := err.(*errors.Error); !ok || unix.Errno(got.Errno()) != errno {
		e.t.Errorf("%s: got %v, want %v", what, err, errno)
	}
}

func (e *env) mkdir(path string, mode linux.FileMode) error {
	return e.vfs.MkdirAt(e.ctx, e.creds, e.at(path), &vfs.MkdirOptions{Mode: mode})
}

func (e *env) mknod(path string, mode linux.FileMode, major, minor uint32) error {
	return e.vfs.MknodAt(e.ctx, e.creds, e.at(path), &vfs.MknodOptions{Mode: mode, DevMajor: major, DevMinor: minor})
}

func (e *env) symlink(target, path string) error {
	return e.vfs.SymlinkAt(e.ctx, e.creds, e.at(path), target)
}

func (e *env) link(oldPath, newPath string) error {
	return e.vfs.LinkAt(e.ctx, e.creds, e.at(oldPath), e.at(newPath))
}
func (e *env) unlink(path string) error { return e.vfs.UnlinkAt(e.ctx, e.creds, e.at(path)) }
func (e *env) rmdir(path string) error  { return e.vfs.RmdirAt(e.ctx, e.creds, e.at(path)) }
func (e *env) rename(oldPath, newPath string, flags uint32) error {
	return e.vfs.RenameAt(e.ctx, e.creds, e.at(oldPath), e.at(newPath), &vfs.RenameOptions{Flags: flags})
}

func (e *env) stat(path string) linux.Statx {
	e.t.Helper()
	st, err := e.vfs.StatAt(e.ctx, e.creds, e.at(path), &vfs.StatOptions{Mask: linux.STATX_BASIC_STATS | linux.STATX_BTIME})
	if err != nil {
		e.t.Fatalf("stat %s: %v", path, err)
	}
	return st
}

func (e *env) missing(path string) {
	e.t.Helper()
	_, err := e.vfs.StatAt(e.ctx, e.creds, e.at(path), &vfs.StatOptions{})
	e.want(err, unix.ENOENT, "stat "+path)
}

func (e *env) open(path string, flags uint32, mode linux.FileMode) (*vfs.FileDescription, error) {
	return e.vfs.OpenAt(e.ctx, e.creds, e.follow(path), &vfs.OpenOptions{Flags: flags, Mode: mode})
}

func (e *env) mustOpen(path string, flags uint32, mode linux.FileMode) *vfs.FileDescription {
	e.t.Helper()
	fd, err := e.open(path, flags, mode)
	if err != nil {
		e.t.Fatalf("open %s: %v", path, err)
	}
	return fd
}

func (e *env) pwrite(fd *vfs.FileDescription, p []byte, off int64) {
	e.t.Helper()
	n, err := fd.PWrite(e.ctx, usermem.BytesIOSequence(p), off, vfs.WriteOptions{})
	if err != nil || n != int64(len(p)) {
		e.t.Fatalf("write of %d bytes at %d: %d, %v", len(p), off, n, err)
	}
}

// pread reads n bytes at off, or fewer at the end of file.
func (e *env) pread(fd *vfs.FileDescription, n int, off int64) []byte {
	e.t.Helper()
	p := make([]byte, n)
	done := 0
	for done < n {
		got, err := fd.PRead(e.ctx, usermem.BytesIOSequence(p[done:]), off+int64(done), vfs.ReadOptions{})
		done += int(got)
		if err == io.EOF || err == nil && got == 0 {
			break
		}
		if err != nil {
			e.t.Fatalf("read at %d: %v", off, err)
		}
	}
	return p[:done]
}

func (e *env) put(path string, data []byte) {
	e.t.Helper()
	fd := e.mustOpen(path, linux.O_CREAT|linux.O_TRUNC|linux.O_WRONLY, 0o644)
	defer fd.DecRef(e.ctx)
	e.pwrite(fd, data, 0)
}

func (e *env) get(path string) []byte {
	e.t.Helper()
	fd := e.mustOpen(path, linux.O_RDONLY, 0)
	defer fd.DecRef(e.ctx)
	return e.pread(fd, int(e.stat(path).Size)+1, 0)
}

func (e *env) same(path string, want []byte) {
	e.t.Helper()
	if got := e.get(path); !bytes.Equal(got, want) {
		e.t.Errorf("%s: %d bytes that differ from the %d expected", path, len(got), len(want))
	}
}

type dirents struct{ list []vfs.Dirent }

func (d *dirents) Handle(e vfs.Dirent) error { d.list = append(d.list, e); return nil }

func (e *env) ls(path string) map[string]vfs.Dirent {
	e.t.Helper()
	fd := e.mustOpen(path, linux.O_RDONLY|linux.O_DIRECTORY, 0)
	defer fd.DecRef(e.ctx)
	var d dirents
	e.ok(fd.IterDirents(e.ctx, &d))
	m := make(map[string]vfs.Dirent)
	for _, x := range d.list {
		if _, ok := m[x.Name]; ok {
			e.t.Errorf("%s lists %q twice", path, x.Name)
		}
		m[x.Name] = x
	}
	return m
}

func (e *env) setxattr(path, name, value string) error {
	return e.vfs.SetXattrAt(e.ctx, e.creds, e.at(path), &vfs.SetXattrOptions{Name: name, Value: value})
}

func (e *env) getxattr(path, name string) (string, error) {
	return e.vfs.GetXattrAt(e.ctx, e.creds, e.at(path), &vfs.GetXattrOptions{Name: name})
}

func (e *env) setstat(path string, st linux.Statx, clearPrivs bool) error {
	return e.vfs.SetStatAt(e.ctx, e.creds, e.at(path), &vfs.SetStatOptions{Stat: st, ClearPrivs: clearPrivs})
}

func (e *env) truncate(path string, size uint64) {
	e.t.Helper()
	e.ok(e.setstat(path, linux.Statx{Mask: linux.STATX_SIZE, Size: size}, true))
}

// pattern is n bytes that tell their place.
func pattern(n int, seed byte) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i>>12)*31 + byte(i)*7 + seed
	}
	return p
}
