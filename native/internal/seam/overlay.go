package seam

import (
	goContext "context"
	"fmt"
	"slices"
	"strings"

	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/sentry/fsimpl/overlay"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/kernel/auth"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
	"gvisor.dev/gvisor/pkg/state"
)

// overlayType is the stock overlay opened for what dockerd and containerd do with it: an upper layer on any file
// system, layer paths relative to the caller's directory, and the options that only state what the stock overlay does.
type overlayType struct{ overlay.FilesystemType }

// ReplaceOverlay puts overlayType in place of the stock "overlay". Call it after boot.New and before the guest runs.
func ReplaceOverlay(v *vfs.VirtualFilesystem) error {
	return replaceFilesystemType(v, overlay.Name, &overlayType{}, vfs.RegisterFilesystemTypeOptions{AllowUserMount: true, AllowUserList: true})
}

// GetFilesystem implements vfs.FilesystemType.GetFilesystem.
func (o *overlayType) GetFilesystem(ctx context.Context, v *vfs.VirtualFilesystem, creds *auth.Credentials, source string, opts vfs.GetFilesystemOptions) (*vfs.Filesystem, *vfs.Dentry, error) {
	if opts.InternalData == nil {
		data, err := overlayOptions(opts.Data, func() (string, error) { return workingDirectory(ctx, v) })
		if err != nil {
			ctx.Infof("overlay mount refused: %v", err)
			return nil, nil, linuxerr.EINVAL
		}
		opts.Data = data
	}
	opts.InternalMount = true
	return o.FilesystemType.GetFilesystem(ctx, v, creds, source, opts)
}

// accepted lists the options of Linux's overlayfs which the stock type does not know, with the values under which
// Linux behaves as the stock type always does (or differs in ways that nobody can depend on). Any other value is refused, as a
// kernel built without the feature refuses it. nil accepts every value.
//
// Source: Documentation/filesystems/overlayfs.rst. dockerd and containerd pass index=off where the kernel has the
// switch, containerd volatile when asked to, podman and buildkit metacopy=off and redirect_dir=off.
var accepted = map[string][]string{
	"index":               {"off"},
	"metacopy":            {"off"},
	"redirect_dir":        {"off", "nofollow"},
	"nfs_export":          {"off"},
	"verity":              {"off"},
	"xino":                nil, // inode numbers are stable either way
	"uuid":                nil, // f_fsid only
	"volatile":            {""},
	"default_permissions": {""},
}

// overlayOptions rewrites mount data for the stock type: accepted options are dropped, relative layers made absolute
// below what cwd returns (it is asked only when there is a relative path).
func overlayOptions(data string, cwd func() (string, error)) (string, error) {
	base := ""
	absolute := func(p string) (string, error) {
		if strings.HasPrefix(p, "/") {
			return p, nil
		}
		if base == "" {
			b, err := cwd()
			if err != nil {
				return "", err
			}
			if strings.ContainsAny(b, ",:") {
				return "", fmt.Errorf("relative layer below %q, which the option syntax cannot hold", b)
			}
			base = strings.TrimSuffix(b, "/")
		}
		return base + "/" + p, nil
	}
	var out []string
	for opt := range strings.SplitSeq(data, ",") {
		key, value, hasValue := strings.Cut(opt, "=")
		if values, ok := accepted[key]; ok {
			if values != nil && !slices.Contains(values, value) {
				return "", fmt.Errorf("option %q is not supported", opt)
			}
			continue
		}
		switch key {
		case "":
			continue
		case "upperdir", "workdir", "lowerdir":
			paths := []string{value}
			if key == "lowerdir" {
				paths = strings.Split(value, ":")
			}
			for i, p := range paths {
				if p == "" {
					return "", fmt.Errorf("option %q has an empty path", opt)
				}
				a, err := absolute(p)
				if err != nil {
					return "", err
				}
				paths[i] = a
			}
			out = append(out, key+"="+strings.Join(paths, ":"))
		default:
			if hasValue {
				out = append(out, key+"="+value)
			} else {
				out = append(out, key)
			}
		}
	}
	return strings.Join(out, ","), nil
}

// workingDirectory returns the calling task's current directory as a path below its root.
func workingDirectory(ctx context.Context, v *vfs.VirtualFilesystem) (string, error) {
	t := kernel.TaskFromContext(ctx)
	if t == nil {
		return "", fmt.Errorf("relative layer and no calling task")
	}
	cwd := t.FSContext().WorkingDirectory()
	if !cwd.Ok() {
		return "", fmt.Errorf("relative layer and no working directory")
	}
	defer cwd.DecRef(ctx)
	root := t.FSContext().RootDirectory()
	defer root.DecRef(ctx)
	p, err := v.PathnameReachable(ctx, root, cwd)
	if err != nil {
		return "", fmt.Errorf("relative layer: working directory: %w", err)
	}
	if p == "" {
		return "", fmt.Errorf("relative layer: the working directory is not below the caller's root")
	}
	return p, nil
}

// The registry is part of a checkpoint, so the type must be savable. It has no state.

// StateTypeName implements state.Type.StateTypeName.
func (*overlayType) StateTypeName() string { return "gvx.dev/gvx/native/internal/seam.overlayType" }

// StateFields implements state.Type.StateFields.
func (*overlayType) StateFields() []string { return nil }

// StateSave implements state.SaverLoader.StateSave.
func (*overlayType) StateSave(state.Sink) {}

// StateLoad implements state.SaverLoader.StateLoad.
func (*overlayType) StateLoad(goContext.Context, state.Source) {}

func init() { state.Register((*overlayType)(nil)) }
