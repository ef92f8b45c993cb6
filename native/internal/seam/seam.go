// Package seam is the only place of gvx that reaches into gVisor's private parts.
//
// gVisor is used unmodified, as a library. A few things the product needs have no exported way: the kernel object inside
// boot.Loader, replacing a registered file system type, adding a precompiled seccomp program. Each such access goes by
// reflection, unsafe or linkname, is written down here and nowhere else, and is checked by Check before a sandbox is
// built: when a newer gVisor changes a layout, the start fails with a sentence that names what changed, and nothing is
// read through a stale offset.
package seam

import (
	"errors"
	"fmt"
	"reflect"
	"unsafe"

	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
	"gvisor.dev/gvisor/runsc/boot"
)

// ErrLayout is wrapped by every error that says a private part of gVisor is not as this package knows it.
var ErrLayout = errors.New("gVisor's private layout is not the one gvx was written for")

// Check verifies every private layout that this package relies on. It costs microseconds: call it first thing at start.
func Check() error {
	return errors.Join(
		checkField(reflect.TypeFor[boot.Loader](), "k", reflect.TypeFor[*kernel.Kernel]()),
		checkFSTypes(),
		checkPrecompiled(),
	)
}

// checkField verifies that struct type t has a field of this name and exactly this type.
func checkField(t reflect.Type, name string, want reflect.Type) error {
	f, ok := t.FieldByName(name)
	switch {
	case !ok:
		return fmt.Errorf("%w: %v has no field %q", ErrLayout, t, name)
	case f.Type != want:
		return fmt.Errorf("%w: %v.%s is %v, not %v", ErrLayout, t, name, f.Type, want)
	}
	return nil
}

// checkFSTypes verifies that the registry of file system types is a map from names, as ReplaceOverlay needs it.
func checkFSTypes() error {
	t := reflect.TypeFor[vfs.VirtualFilesystem]()
	f, ok := t.FieldByName("fsTypes")
	if !ok {
		return fmt.Errorf("%w: %v has no field \"fsTypes\"", ErrLayout, t)
	}
	if f.Type.Kind() != reflect.Map || f.Type.Key().Kind() != reflect.String || f.Type.Elem().Kind() != reflect.Pointer {
		return fmt.Errorf("%w: %v.fsTypes is %v, not a map from names to registered types", ErrLayout, t, f.Type)
	}
	return checkField(f.Type.Elem().Elem(), "fsType", reflect.TypeFor[vfs.FilesystemType]())
}

// KernelOf returns the kernel of a loader. The loader makes it in boot.New; a restore replaces it, so fetch it again then.
func KernelOf(l *boot.Loader) (*kernel.Kernel, error) {
	if err := checkField(reflect.TypeFor[boot.Loader](), "k", reflect.TypeFor[*kernel.Kernel]()); err != nil {
		return nil, err
	}
	f := reflect.ValueOf(l).Elem().FieldByName("k")
	k := *(**kernel.Kernel)(unsafe.Pointer(f.UnsafeAddr()))
	if k == nil {
		return nil, fmt.Errorf("%w: boot.Loader.k is nil after New", ErrLayout)
	}
	return k, nil
}

// RegisterFilesystem adds a file system type that only the sandbox may mount: guests see its name in /proc/filesystems
// (as one that needs a block device), but their mount(2) of it is refused.
func RegisterFilesystem(v *vfs.VirtualFilesystem, name string, t vfs.FilesystemType) error {
	return v.RegisterFilesystemType(name, t, &vfs.RegisterFilesystemTypeOptions{AllowUserList: true, RequiresDevice: true})
}

// fsTypeMap returns the settable registry of file system types of v.
func fsTypeMap(v *vfs.VirtualFilesystem) (reflect.Value, error) {
	if err := checkFSTypes(); err != nil {
		return reflect.Value{}, err
	}
	f := reflect.ValueOf(v).Elem().FieldByName("fsTypes")
	return reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Elem(), nil
}

// replaceFilesystemType puts t in place of the type registered as name. It must be called before any task runs: the
// registry's lock is not taken for the removal.
func replaceFilesystemType(v *vfs.VirtualFilesystem, name string, t vfs.FilesystemType, o vfs.RegisterFilesystemTypeOptions) error {
	m, err := fsTypeMap(v)
	if err != nil {
		return err
	}
	key := reflect.ValueOf(name)
	if !m.MapIndex(key).IsValid() {
		return fmt.Errorf("%w: no file system type %q is registered", ErrLayout, name)
	}
	m.SetMapIndex(key, reflect.Value{})
	return v.RegisterFilesystemType(name, t, &o)
}
