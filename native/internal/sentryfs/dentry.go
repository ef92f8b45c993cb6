package sentryfs

import (
	"fmt"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/fspath"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
)

// dentry implements vfs.DentryImpl.
//
// A dentry in the tree stays there whether or not anyone refers to it, until it is unlinked or evicted; both happen with
// filesystem.mu held for writing. refs counts references from outside the tree, so it may go from 0 to 1 only with
// filesystem.mu held. Once out of the tree (dead) a dentry is destroyed when refs drops to 0; it holds a reference on its
// former parent until then, since ".." of a removed directory still leads somewhere.
type dentry struct {
	vfsd vfs.Dentry
	fs   *filesystem

	// refs is the number of references from outside of the tree.
	refs atomic.Int64

	// dead is set when the dentry has left the tree.
	dead atomic.Bool

	// parent is the parent directory, nil for the root. Below filesystem.mu and filesystem.ancestryMu.
	parent atomic.Pointer[dentry]

	// name is the name in parent. Below filesystem.mu and filesystem.ancestryMu.
	name string

	// inode is what the dentry names; it holds a reference. Immutable.
	inode *inode

	// childMu protects children while filesystem.mu is held for reading.
	childMu sync.RWMutex

	// children are the cached children of a directory.
	children map[string]*dentry
}

var _ vfs.DentryImpl = (*dentry)(nil)

// newDentry makes a dentry without references that takes over one on i. The caller puts it into the tree.
func (fs *filesystem) newDentry(i *inode) *dentry {
	d := &dentry{fs: fs, inode: i}
	d.vfsd.Init(d)
	fs.dentries.Add(1)
	return d
}

// IncRef implements vfs.DentryImpl.IncRef.
func (d *dentry) IncRef() {
	if r := d.refs.Add(1); r <= 1 && d.dead.Load() {
		panic(fmt.Sprintf("ext4: reference on a destroyed dentry of inode %d", d.inode.ino))
	}
}

// TryIncRef implements vfs.DentryImpl.TryIncRef.
func (d *dentry) TryIncRef() bool {
	for {
		r := d.refs.Load()
		if r <= 0 {
			return false
		}
		if d.refs.CompareAndSwap(r, r+1) {
			return true
		}
	}
}

// DecRef implements vfs.DentryImpl.DecRef.
func (d *dentry) DecRef(ctx context.Context) {
	r := d.refs.Add(-1)
	if r < 0 {
		panic(fmt.Sprintf("ext4: too many references dropped on a dentry of inode %d", d.inode.ino))
	}
	if r == 0 && d.dead.Load() {
		d.inode.decRef(ctx)
		if p := d.parent.Load(); p != nil {
			p.DecRef(ctx)
		}
	}
}

// insertChildLocked puts child, in no tree yet, into the tree as name.
//
// Preconditions: fs.mu is held for writing, or d.childMu is and child is not visible to anyone else.
func (d *dentry) insertChildLocked(child *dentry, name string) {
	d.fs.ancestryMu.Lock()
	child.parent.Store(d)
	child.name = name
	d.fs.ancestryMu.Unlock()
	if d.children == nil {
		d.children = make(map[string]*dentry)
	}
	d.children[name] = child
}

// unlinkLocked takes d out of the tree for good. The caller holds a reference on d, dropped after fs.mu is released.
//
// Preconditions: fs.mu is held for writing.
func (d *dentry) unlinkLocked() {
	p := d.parent.Load()
	delete(p.children, d.name)
	p.IncRef() // until d is destroyed
	d.fs.dentries.Add(-1)
	d.dead.Store(true)
}

// lookup returns the child called name, without a reference; it stays valid while fs.mu is held.
//
// Preconditions: fs.mu is held; d is a directory; name is neither "." nor "..".
func (d *dentry) lookup(name string) (*dentry, error) {
	d.childMu.RLock()
	child := d.children[name]
	d.childMu.RUnlock()
	if child != nil {
		return child, nil
	}
	d.childMu.Lock()
	defer d.childMu.Unlock()
	if child := d.children[name]; child != nil {
		return child, nil
	}
	ei, err := d.inode.ei.Lookup(name)
	if err != nil {
		return nil, toErr(err)
	}
	child = d.fs.newDentry(d.fs.inodeOf(ei))
	d.insertChildLocked(child, name)
	return child, nil
}

// trim evicts unused dentries when there are too many. The caller holds no lock.
func (fs *filesystem) trim(ctx context.Context) {
	if fs.dentries.Load() <= maxCachedDentries {
		return
	}
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.evictLocked(ctx, fs.root, maxCachedDentries*3/4)
}

// evictLocked drops unused dentries below d until only keep are left in the tree.
func (fs *filesystem) evictLocked(ctx context.Context, d *dentry, keep int64) {
	for name, child := range d.children {
		if fs.dentries.Load() <= keep {
			return
		}
		fs.evictLocked(ctx, child, keep)
		if len(child.children) != 0 || child.refs.Load() != 0 || !child.inode.forgettable() {
			continue
		}
		delete(d.children, name)
		fs.dentries.Add(-1)
		child.inode.decRef(ctx)
	}
}

// dropTreeLocked lets go of the inodes of d and of everything below it, when the file system is released.
func (fs *filesystem) dropTreeLocked(ctx context.Context, d *dentry) {
	for _, child := range d.children {
		fs.dropTreeLocked(ctx, child)
	}
	d.children = nil
	d.inode.decRef(ctx)
}

// InotifyWithParent implements vfs.DentryImpl.InotifyWithParent.
func (d *dentry) InotifyWithParent(ctx context.Context, events, cookie uint32, et vfs.EventType) {
	if d.inode.isDir() {
		events |= linux.IN_ISDIR
	}
	deleted := d.dead.Load()
	d.fs.ancestryMu.RLock()
	parent, name := d.parent.Load(), d.name
	d.fs.ancestryMu.RUnlock()
	// As in Linux, the parent is told first.
	if parent != nil {
		parent.inode.watches.Notify(ctx, name, events, cookie, et, deleted)
	}
	d.inode.watches.Notify(ctx, "", events, cookie, et, deleted)
}

// Watches implements vfs.DentryImpl.Watches.
func (d *dentry) Watches() *vfs.Watches { return &d.inode.watches }

// OnZeroWatches implements vfs.DentryImpl.OnZeroWatches.
func (d *dentry) OnZeroWatches(context.Context) {}

// isAncestorOf tells whether d is a proper ancestor of e.
func (d *dentry) isAncestorOf(e *dentry) bool {
	return d != e && d.fs.isDescendant(&d.vfsd, e)
}

// isDescendant tells whether d is root or below it.
func (fs *filesystem) isDescendant(root *vfs.Dentry, d *dentry) bool {
	fs.ancestryMu.RLock()
	defer fs.ancestryMu.RUnlock()
	for d != nil && &d.vfsd != root {
		d = d.parent.Load()
	}
	return d != nil
}

// IsDescendant implements vfs.FilesystemImpl.IsDescendant.
func (fs *filesystem) IsDescendant(vfsroot, vd vfs.VirtualDentry) bool {
	return fs.isDescendant(vfsroot.Dentry(), vd.Dentry().Impl().(*dentry))
}

// PrependPath implements vfs.FilesystemImpl.PrependPath.
func (fs *filesystem) PrependPath(_ context.Context, vfsroot, vd vfs.VirtualDentry, b *fspath.Builder) error {
	fs.ancestryMu.RLock()
	defer fs.ancestryMu.RUnlock()
	mnt, d := vd.Mount(), vd.Dentry().Impl().(*dentry)
	for {
		if mnt == vfsroot.Mount() && &d.vfsd == vfsroot.Dentry() {
			return vfs.PrependPathAtVFSRootError{}
		}
		if mnt != nil && &d.vfsd == mnt.Root() {
			return nil
		}
		parent := d.parent.Load()
		if parent == nil {
			return vfs.PrependPathAtNonMountRootError{}
		}
		b.PrependComponent(d.name)
		d = parent
	}
}
