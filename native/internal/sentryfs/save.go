package sentryfs

import (
	goContext "context"
	"fmt"
	"sync"

	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/sentry/memmap"
	"gvisor.dev/gvisor/pkg/sentry/pgalloc"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
	"gvisor.dev/gvisor/pkg/state"
)

// Checkpoints save what the Sentry knows of the files in use: dentries, descriptions, locks, mappings. The volume itself is saved and
// brought back by whoever makes the checkpoint; a restore finds it by its key among the registered volumes, and its
// inodes by their numbers. A file that has lost its last name is an orphan on such a volume: while the driver opens only volumes
// without orphans, a restore with one fails and says so. The methods below are what gVisor's stateify would generate; it is not part of the module.

var volumes sync.Map // of string (Volume.Key) to *Volume

// RegisterVolume makes v known to a restore under its key. Call it before the checkpoint is loaded.
func RegisterVolume(v *Volume) { volumes.Store(v.Key, v) }

var _ vfs.FilesystemImplSaveRestoreExtension = (*filesystem)(nil)

// PrepareSave implements vfs.FilesystemImplSaveRestoreExtension.PrepareSave.
func (fs *filesystem) PrepareSave(ctx context.Context) error {
	fs.zeroMu.Lock()
	defer fs.zeroMu.Unlock()
	if fs.zeros.Length() != 0 {
		fs.zeroMF.DecRef(fs.zeros)
		fs.zeros = memmap.FileRange{}
	}
	return fs.Sync(ctx)
}

// BeforeResume implements vfs.FilesystemImplSaveRestoreExtension.BeforeResume.
func (fs *filesystem) BeforeResume(context.Context) {}

// CompleteRestore implements vfs.FilesystemImplSaveRestoreExtension.CompleteRestore.
func (fs *filesystem) CompleteRestore(ctx context.Context, _ vfs.CompleteRestoreOptions) error {
	v, ok := volumes.Load(fs.vol.Key)
	if !ok {
		return fmt.Errorf("ext4: no volume with key %q is registered for the restore", fs.vol.Key)
	}
	fs.vol = v.(*Volume)
	fs.vol.setMounted(fs, true)
	fs.setDevice()
	fs.zeroMF = pgalloc.MemoryFileFromContext(ctx)
	for ino, i := range fs.inodes {
		ei, err := fs.vol.FS.Inode(ino)
		if err != nil {
			return fmt.Errorf("ext4: inode %d of volume %q, in use at the checkpoint: %w", ino, fs.vol.Key, err)
		}
		i.ei = ei
	}
	return nil
}

func init() {
	state.Register((*FilesystemType)(nil))
	state.Register((*filesystem)(nil))
	state.Register((*dentry)(nil))
	state.Register((*inode)(nil))
	state.Register((*fileDescription)(nil))
	state.Register((*directoryFD)(nil))
	state.Register((*regularFileFD)(nil))
}

const statePrefix = "gvx.dev/gvx/native/internal/sentryfs."

// StateTypeName implements state.Type.StateTypeName.
func (*FilesystemType) StateTypeName() string { return statePrefix + "FilesystemType" }

// StateFields implements state.Type.StateFields.
func (*FilesystemType) StateFields() []string { return nil }

// StateSave implements state.SaverLoader.StateSave.
func (*FilesystemType) StateSave(state.Sink) {}

// StateLoad implements state.SaverLoader.StateLoad.
func (*FilesystemType) StateLoad(goContext.Context, state.Source) {}

// StateTypeName implements state.Type.StateTypeName.
func (*filesystem) StateTypeName() string { return statePrefix + "filesystem" }

// StateFields implements state.Type.StateFields.
func (*filesystem) StateFields() []string {
	return []string{"vfsfs", "vol", "devMinor", "clock", "mf", "rootNS", "root", "dentries", "inodes", "baseMF"}
}

// StateSave implements state.SaverLoader.StateSave.
func (fs *filesystem) StateSave(s state.Sink) {
	s.SaveValue(1, fs.vol.Key)
	s.SaveValue(7, fs.dentries.Load())
	s.Save(0, &fs.vfsfs)
	s.Save(2, &fs.devMinor)
	s.Save(3, &fs.clock)
	s.Save(4, &fs.mf)
	s.Save(5, &fs.rootNS)
	s.Save(6, &fs.root)
	s.Save(8, &fs.inodes)
	s.Save(9, &fs.baseMF)
}

// StateLoad implements state.SaverLoader.StateLoad.
func (fs *filesystem) StateLoad(_ goContext.Context, s state.Source) {
	s.Load(0, &fs.vfsfs)
	s.Load(2, &fs.devMinor)
	s.Load(3, &fs.clock)
	s.Load(4, &fs.mf)
	s.Load(5, &fs.rootNS)
	s.Load(6, &fs.root)
	s.Load(8, &fs.inodes)
	s.Load(9, &fs.baseMF)
	s.LoadValue(1, new(string), func(v any) { fs.vol = &Volume{Key: v.(string)} })
	s.LoadValue(7, new(int64), func(v any) { fs.dentries.Store(v.(int64)) })
}

// StateTypeName implements state.Type.StateTypeName.
func (*dentry) StateTypeName() string { return statePrefix + "dentry" }

// StateFields implements state.Type.StateFields.
func (*dentry) StateFields() []string {
	return []string{"vfsd", "fs", "refs", "dead", "parent", "name", "inode", "children"}
}

// StateSave implements state.SaverLoader.StateSave.
func (d *dentry) StateSave(s state.Sink) {
	s.SaveValue(2, d.refs.Load())
	s.SaveValue(3, d.dead.Load())
	s.SaveValue(4, d.parent.Load())
	s.Save(0, &d.vfsd)
	s.Save(1, &d.fs)
	s.Save(5, &d.name)
	s.Save(6, &d.inode)
	s.Save(7, &d.children)
}

// StateLoad implements state.SaverLoader.StateLoad.
func (d *dentry) StateLoad(_ goContext.Context, s state.Source) {
	s.Load(0, &d.vfsd)
	s.Load(1, &d.fs)
	s.Load(5, &d.name)
	s.Load(6, &d.inode)
	s.Load(7, &d.children)
	s.LoadValue(2, new(int64), func(v any) { d.refs.Store(v.(int64)) })
	s.LoadValue(3, new(bool), func(v any) { d.dead.Store(v.(bool)) })
	s.LoadValue(4, new(*dentry), func(v any) { d.parent.Store(v.(*dentry)) })
}

// StateTypeName implements state.Type.StateTypeName.
func (*inode) StateTypeName() string { return statePrefix + "inode" }

// StateFields implements state.Type.StateFields.
func (*inode) StateFields() []string {
	return []string{"fs", "ino", "fileType", "refs", "mapEnd", "writableMapped", "mappings", "writers", "pipe", "ep", "tmpfile", "locks", "watches"}
}

// StateSave implements state.SaverLoader.StateSave.
func (i *inode) StateSave(s state.Sink) {
	s.SaveValue(5, i.writableMapped.Load())
	s.SaveValue(7, i.writers.Load())
	s.SaveValue(10, i.tmpfile.Load())
	s.Save(0, &i.fs)
	s.Save(1, &i.ino)
	s.Save(2, &i.fileType)
	s.Save(3, &i.refs)
	s.Save(4, &i.mapEnd)
	s.Save(6, &i.mappings)
	s.Save(8, &i.pipe)
	s.Save(9, &i.ep)
	s.Save(11, &i.locks)
	s.Save(12, &i.watches)
}

// StateLoad implements state.SaverLoader.StateLoad.
func (i *inode) StateLoad(_ goContext.Context, s state.Source) {
	s.Load(0, &i.fs)
	s.Load(1, &i.ino)
	s.Load(2, &i.fileType)
	s.Load(3, &i.refs)
	s.Load(4, &i.mapEnd)
	s.Load(6, &i.mappings)
	s.Load(8, &i.pipe)
	s.Load(9, &i.ep)
	s.Load(11, &i.locks)
	s.Load(12, &i.watches)
	s.LoadValue(5, new(bool), func(v any) { i.writableMapped.Store(v.(bool)) })
	s.LoadValue(7, new(int64), func(v any) { i.writers.Store(v.(int64)) })
	s.LoadValue(10, new(bool), func(v any) { i.tmpfile.Store(v.(bool)) })
}

// StateTypeName implements state.Type.StateTypeName.
func (*fileDescription) StateTypeName() string { return statePrefix + "fileDescription" }

// StateFields implements state.Type.StateFields.
func (*fileDescription) StateFields() []string {
	return []string{"vfsfd", "FileDescriptionDefaultImpl", "LockFD"}
}

// StateSave implements state.SaverLoader.StateSave.
func (fd *fileDescription) StateSave(s state.Sink) {
	s.Save(0, &fd.vfsfd)
	s.Save(1, &fd.FileDescriptionDefaultImpl)
	s.Save(2, &fd.LockFD)
}

// StateLoad implements state.SaverLoader.StateLoad.
func (fd *fileDescription) StateLoad(_ goContext.Context, s state.Source) {
	s.Load(0, &fd.vfsfd)
	s.Load(1, &fd.FileDescriptionDefaultImpl)
	s.Load(2, &fd.LockFD)
}

// StateTypeName implements state.Type.StateTypeName.
func (*directoryFD) StateTypeName() string { return statePrefix + "directoryFD" }

// StateFields implements state.Type.StateFields.
func (*directoryFD) StateFields() []string {
	return []string{"fileDescription", "DirectoryFileDescriptionDefaultImpl", "off"}
}

// StateSave implements state.SaverLoader.StateSave.
func (fd *directoryFD) StateSave(s state.Sink) {
	s.Save(0, &fd.fileDescription)
	s.Save(1, &fd.DirectoryFileDescriptionDefaultImpl)
	s.Save(2, &fd.off)
}

// StateLoad implements state.SaverLoader.StateLoad.
func (fd *directoryFD) StateLoad(_ goContext.Context, s state.Source) {
	s.Load(0, &fd.fileDescription)
	s.Load(1, &fd.DirectoryFileDescriptionDefaultImpl)
	s.Load(2, &fd.off)
}

// StateTypeName implements state.Type.StateTypeName.
func (*regularFileFD) StateTypeName() string { return statePrefix + "regularFileFD" }

// StateFields implements state.Type.StateFields.
func (*regularFileFD) StateFields() []string { return []string{"fileDescription", "off"} }

// StateSave implements state.SaverLoader.StateSave.
func (fd *regularFileFD) StateSave(s state.Sink) {
	s.Save(0, &fd.fileDescription)
	s.Save(1, &fd.off)
}

// StateLoad implements state.SaverLoader.StateLoad.
func (fd *regularFileFD) StateLoad(_ goContext.Context, s state.Source) {
	s.Load(0, &fd.fileDescription)
	s.Load(1, &fd.off)
}
