package seam

import (
	"fmt"
	"path"

	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/fspath"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/kernel/auth"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
)

// Mount describes one mount made from the Sentry's side.
type Mount struct {
	// Type is the registered name of the file system type.
	Type string
	// Source is what /proc/mounts shows as the device.
	Source string
	// Path is the absolute path of the mount point in the guest; missing directories are made with mode 0755.
	Path string
	// ReadOnly mounts read-only.
	ReadOnly bool
	// Data is handed to the type as GetFilesystemOptions.InternalData.
	Data any
}

// MountVolume mounts m in the mount namespace of the guest's init. It is meant for the seccheck hook "container/start",
// when the init task exists and has not run yet; ctx may be any context of the Sentry.
func MountVolume(ctx context.Context, k *kernel.Kernel, m Mount) error {
	if !path.IsAbs(m.Path) {
		return fmt.Errorf("mount point %q is not absolute", m.Path)
	}
	initTG := k.GlobalInit()
	if initTG == nil || initTG.Leader() == nil {
		return fmt.Errorf("mounting %s: the guest has no init task yet", m.Path)
	}
	mntns := initTG.Leader().MountNamespace()
	root := mntns.Root(ctx)
	defer root.DecRef(ctx)
	creds := auth.NewRootCredentials(k.RootUserNamespace())
	// Path walks ask the context for the mount namespace, which the Sentry's own context does not carry.
	ctx = vfs.WithRoot(vfs.WithMountNamespace(ctx, mntns), root)
	if err := k.VFS().MkdirAllAt(ctx, path.Clean(m.Path), root, creds, &vfs.MkdirOptions{Mode: 0o755}, true); err != nil {
		return fmt.Errorf("mount point %s: %w", m.Path, err)
	}
	at := vfs.PathOperation{Root: root, Start: root, Path: fspath.Parse(m.Path), FollowFinalSymlink: true}
	opts := vfs.MountOptions{
		ReadOnly:             m.ReadOnly,
		GetFilesystemOptions: vfs.GetFilesystemOptions{InternalMount: true, InternalData: m.Data},
	}
	if _, err := k.VFS().MountAt(ctx, creds, m.Source, &at, m.Type, &opts); err != nil {
		return fmt.Errorf("mounting %s on %s: %w", m.Type, m.Path, err)
	}
	return nil
}
