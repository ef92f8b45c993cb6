package sandbox

import (
	"fmt"
	"path"
	"sort"
	"strings"

	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/fd"
	"gvisor.dev/gvisor/pkg/fspath"
	"gvisor.dev/gvisor/pkg/sentry/fsimpl/mqfs"
	"gvisor.dev/gvisor/pkg/sentry/fsimpl/tmpfs"
	"gvisor.dev/gvisor/pkg/sentry/kernel/auth"
	"gvisor.dev/gvisor/pkg/sentry/seccheck"
	pb "gvisor.dev/gvisor/pkg/sentry/seccheck/points/points_go_proto"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
	"gvisor.dev/gvisor/pkg/usermem"

	"gvx.dev/gvx/native/internal/netnat"
	"gvx.dev/gvx/native/internal/seam"
)

// sinkName is the name by which seccheck knows the mounter.
const sinkName = "gvx-mounter"

// mounter is called back by gVisor between the creation of the guest's init task and its first instruction: the only
// moment at which its mount namespace exists and nobody uses it.
type mounter struct {
	seccheck.SinkDefaults
	s *sentry
}

// Name implements seccheck.Sink.Name.
func (*mounter) Name() string { return sinkName }

// ContainerStart implements seccheck.Sink.ContainerStart. An error returned here would be dropped: fail ends the process.
func (m *mounter) ContainerStart(context.Context, seccheck.FieldSet, *pb.Start) error {
	if err := m.s.completeGuest(); err != nil {
		m.s.fail(err)
	}
	return nil
}

// installMounter registers the callback. boot.New resets seccheck's registry of sessions but not of sinks, so the
// session itself is created by prepareKernel.
func (s *sentry) installMounter() error {
	seccheck.RegisterSink(seccheck.SinkDesc{
		Name: sinkName,
		New:  func(map[string]any, *fd.FD) (seccheck.Sink, error) { return &mounter{s: s}, nil },
	})
	return nil
}

// prepareKernel runs after boot.New: it puts our file system types and repairs in place and arms the mounter.
func (s *sentry) prepareKernel() error {
	if err := seam.ReplaceOverlay(s.kernel.VFS()); err != nil {
		return err
	}
	if err := seam.FilterBridges(s.kernel); err != nil {
		return err
	}
	if err := seam.RestartOpens(); err != nil {
		return err
	}
	if err := s.openVolumes(); err != nil {
		return err
	}
	return seccheck.Create(&seccheck.SessionConfig{
		Name:   seccheck.DefaultSessionName,
		Points: []seccheck.PointConfig{{Name: "container/start"}},
		Sinks:  []seccheck.SinkConfig{{Name: sinkName}},
	}, false)
}

// completeGuest makes the episode's mounts and the files that describe the guest's network, as docker does.
func (s *sentry) completeGuest() error {
	k := s.kernel
	leader := k.GlobalInit().Leader()
	mntns := leader.MountNamespace()
	ctx := context.Context(k.SupervisorContext())
	root := mntns.Root(ctx)
	defer root.DecRef(ctx)
	// Path walks ask the context for the mount namespace, which the Sentry's own context does not carry.
	ctx = vfs.WithRoot(vfs.WithMountNamespace(ctx, mntns), root)
	g := &guestFiles{ctx: ctx, vfs: k.VFS(), root: root, creds: auth.NewRootCredentials(k.RootUserNamespace())}

	for name, content := range etcFiles(s.cfg.Episode) {
		if err := g.write(name, content); err != nil {
			return fmt.Errorf("writing %s: %w", name, err)
		}
	}
	// gVisor knows this one as a file system of guests' only, not of OCI documents.
	if err := g.mount("/dev/mqueue", mqfs.Name, vfs.MountOptions{Flags: vfs.MountFlags{NoSUID: true, NoDev: true, NoExec: true}}); err != nil {
		return fmt.Errorf("mounting /dev/mqueue: %w", err)
	}
	if err := s.mountAll(g); err != nil {
		return err
	}
	// The init task's working directory was resolved before these mounts covered it.
	cwd := path.Clean(s.cfg.Episode.Process.Cwd)
	for _, m := range s.cfg.Episode.Mounts {
		if cwd == m.Destination || strings.HasPrefix(cwd, m.Destination+"/") {
			if err := g.vfs.MkdirAllAt(ctx, cwd, root, g.creds, &vfs.MkdirOptions{Mode: 0o755}, true); err != nil {
				return fmt.Errorf("working directory %s: %w", cwd, err)
			}
			d, err := g.vfs.GetDentryAt(ctx, g.creds, g.at(cwd), &vfs.GetDentryOptions{CheckSearchable: true})
			if err != nil {
				return fmt.Errorf("working directory %s: %w", cwd, err)
			}
			leader.FSContext().SetWorkingDirectory(ctx, d)
			d.DecRef(ctx)
			break
		}
	}
	return nil
}

// mountAll makes the mounts, shallow ones first so that a deeper one is not hidden.
func (s *sentry) mountAll(g *guestFiles) error {
	order := make([]int, len(s.cfg.Episode.Mounts))
	for i := range order {
		order[i] = i
	}
	depth := func(i int) int { return strings.Count(s.cfg.Episode.Mounts[i].Destination, "/") }
	sort.SliceStable(order, func(a, b int) bool { return depth(order[a]) < depth(order[b]) })
	for _, i := range order {
		m := s.cfg.Episode.Mounts[i]
		var err error
		switch m.Kind {
		case MountVolume:
			err = s.mountVolume(g, i)
		case MountTmpfs:
			err = g.mountTmpfs(m)
		}
		if err != nil {
			return &failure{KindVolume, fmt.Errorf("mounting %s: %w", m.Destination, err)}
		}
	}
	return nil
}

// guestFiles is the guest's file tree, seen as its root.
type guestFiles struct {
	ctx   context.Context
	vfs   *vfs.VirtualFilesystem
	root  vfs.VirtualDentry
	creds *auth.Credentials
}

func (g *guestFiles) at(name string) *vfs.PathOperation {
	return &vfs.PathOperation{Root: g.root, Start: g.root, Path: fspath.Parse(name), FollowFinalSymlink: true}
}

// write makes a regular file, in place of whatever had the name: where an image has a symlink (/etc/resolv.conf of systemd's), its
// target is none of our business.
func (g *guestFiles) write(name, content string) error {
	if err := g.vfs.MkdirAllAt(g.ctx, path.Dir(name), g.root, g.creds, &vfs.MkdirOptions{Mode: 0o755}, true); err != nil {
		return err
	}
	pop := g.at(name)
	pop.FollowFinalSymlink = false
	if err := g.vfs.UnlinkAt(g.ctx, g.creds, pop); err != nil && !linuxerr.Equals(linuxerr.ENOENT, err) {
		return err
	}
	f, err := g.vfs.OpenAt(g.ctx, g.creds, pop, &vfs.OpenOptions{Flags: linux.O_WRONLY | linux.O_CREAT | linux.O_EXCL, Mode: 0o644})
	if err != nil {
		return err
	}
	defer f.DecRef(g.ctx)
	_, err = f.Write(g.ctx, usermem.BytesIOSequence([]byte(content)), vfs.WriteOptions{})
	return err
}

// mount mounts a file system that needs no device, making the mount point when it is missing.
func (g *guestFiles) mount(dst, fsType string, opts vfs.MountOptions) error {
	if err := g.vfs.MkdirAllAt(g.ctx, dst, g.root, g.creds, &vfs.MkdirOptions{Mode: 0o755}, true); err != nil {
		return err
	}
	_, err := g.vfs.MountAt(g.ctx, g.creds, fsType, g.at(dst), fsType, &opts)
	return err
}

func (g *guestFiles) mountTmpfs(m Mount) error {
	data := "mode=1777" // docker's default for --tmpfs
	if m.SizeBytes > 0 {
		data += fmt.Sprintf(",size=%d", m.SizeBytes)
	}
	return g.mount(m.Destination, tmpfs.Name, vfs.MountOptions{
		ReadOnly:             m.ReadOnly,
		Flags:                vfs.MountFlags{NoSUID: true, NoDev: true, NoExec: true},
		GetFilesystemOptions: vfs.GetFilesystemOptions{Data: data, InternalMount: true},
	})
}

// etcFiles returns the files which docker also provides to every container, by path.
func etcFiles(e *Episode) map[string]string {
	hosts := "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	resolv := ""
	if e.Network.Mode == NetworkNAT {
		hosts += netnat.Guest.String() + "\t" + e.Hostname + "\n"
		resolv = "nameserver " + netnat.DNS.String() + "\n"
	} else {
		hosts += "127.0.1.1\t" + e.Hostname + "\n"
	}
	return map[string]string{"/etc/hostname": e.Hostname + "\n", "/etc/hosts": hosts, "/etc/resolv.conf": resolv}
}
