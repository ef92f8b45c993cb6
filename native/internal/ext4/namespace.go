package ext4

import (
	"math/rand/v2"
	"syscall"
)

// typeOfMode maps the type bits of a mode to a directory entry's type.
var typeOfMode = map[uint16]uint8{
	syscall.S_IFREG: TypeRegular, syscall.S_IFDIR: TypeDir, syscall.S_IFCHR: TypeChar, syscall.S_IFBLK: TypeBlock,
	syscall.S_IFIFO: TypeFIFO, syscall.S_IFSOCK: TypeSocket, syscall.S_IFLNK: TypeSymlink,
}

func (i *Inode) direntType() uint8 { return typeOfMode[i.kind] }

// newInode makes an inode with one reference that nothing names yet. A directory
// gets its first block, a symlink its target. parent is where its name will be.
func (fs *FS) newInode(h *handle, parent *Inode, n New, links uint16) (*Inode, error) {
	if n.Mode&syscall.S_IFMT == 0 {
		n.Mode |= syscall.S_IFREG
	}
	kind := n.Mode & syscall.S_IFMT
	if _, ok := typeOfMode[kind]; !ok {
		return nil, syscall.EINVAL
	}
	if kind == syscall.S_IFLNK {
		if n.Target == "" {
			return nil, syscall.ENOENT
		}
		if len(n.Target) >= fs.sb.blockSize {
			return nil, syscall.ENAMETOOLONG
		}
	}
	ino, err := fs.allocInode(h, parent.ino, kind == syscall.S_IFDIR)
	if err != nil {
		return nil, err
	}
	i := fs.newHandle(ino)
	i.load.Do(func() {})
	i.kind = kind
	i.reshaped = true
	i.refs = 1
	i.raw = make([]byte, fs.sb.inodeSize)
	le.PutUint16(i.raw[offMode:], n.Mode)
	i.putIDs(n.UID, n.GID)
	i.setLinks(links)
	le.PutUint32(i.raw[offGeneration:], rand.Uint32())
	if len(i.raw) > 128 {
		le.PutUint16(i.raw[offExtraIsize:], uint16(fs.sb.wantExtra))
	}
	i.touch(SetAtime | SetMtime | SetCtime)
	if hasExtra(i.raw, offCrtimeEx+4) {
		i.putTime(offCrtime, offCrtimeEx, fs.timespec())
	}
	inherited := parent.flags() & flagsInherited
	if kind != syscall.S_IFDIR {
		inherited &^= FlagDirSync
	}
	if kind != syscall.S_IFREG && kind != syscall.S_IFDIR {
		inherited &= FlagNoDump | FlagNoAtime
	}
	i.setFlags(inherited)
	switch kind {
	case syscall.S_IFREG:
		i.initExtents()
	case syscall.S_IFDIR:
		i.initExtents()
		err = i.initDir(h, parent.ino)
	case syscall.S_IFLNK:
		err = i.initSymlink(h, n.Target)
	case syscall.S_IFCHR, syscall.S_IFBLK:
		i.setDevice(n.RdevMajor, n.RdevMinor)
	}
	if err == nil {
		err = i.flush(h)
	}
	if err != nil {
		if uerr := i.erase(h); uerr != nil {
			return nil, uerr
		}
		return nil, err
	}
	fs.icMu.Lock()
	fs.inodes[ino] = i
	fs.icMu.Unlock()
	return i, nil
}

// unmake undoes newInode. i is of no use afterwards.
func (i *Inode) unmake(h *handle) error {
	i.fs.icMu.Lock()
	if i.fs.inodes[i.ino] == i {
		delete(i.fs.inodes, i.ino)
	}
	i.fs.icMu.Unlock()
	return i.erase(h)
}

// initSymlink stores the target: in i_block when shorter than it, else in a block.
func (i *Inode) initSymlink(h *handle, target string) error {
	i.setSize(int64(len(target)))
	if len(target) < lenBlock {
		copy(i.root(), target)
		return nil
	}
	i.initExtents()
	r, err := i.fs.reserve(i.blockGoal(), 1, nil, false)
	if err != nil {
		return err
	}
	p := make([]byte, i.fs.sb.blockSize)
	copy(p, target)
	if _, err = i.fs.dev.WriteAt(p, int64(r.start)<<i.fs.sb.blockBits); err == nil {
		err = i.insertExtent(h, extent{0, 1, r.start, false})
	}
	if err != nil {
		i.fs.cancel(r)
		return err
	}
	return i.fs.commit(h, r)
}

// incLinks counts one more subdirectory; EMLINK is canIncLinks'. i.mu is held exclusively.
func (i *Inode) incLinks() {
	n := i.links()
	if n == 1 || n >= MaxLinks {
		n = 0 // dir_nlink: 1 stands for more than can be counted
	}
	i.setLinks(n + 1)
}

func (i *Inode) decLinks() {
	if n := i.links(); n > 2 {
		i.setLinks(n - 1)
	}
}

// canIncLinks tells whether a directory may get one more subdirectory.
func (i *Inode) canIncLinks() bool {
	return i.links() < MaxLinks || i.fs.sb.has(roCompatDirNlink) && i.hasIndex()
}

// openLive opens a directory for changing; ENOENT when it has been removed.
// i.mu is held exclusively.
func (i *Inode) openLive() error {
	if !i.isDir() {
		return syscall.ENOTDIR
	}
	if i.links() == 0 {
		return syscall.ENOENT
	}
	return i.openDir()
}

// touched stores the times of a changed directory.
func (i *Inode) touched(h *handle) error {
	i.touch(SetMtime | SetCtime)
	return i.flush(h)
}

// Create makes a file, directory, symlink, device, fifo or socket and returns it with a reference.
func (i *Inode) Create(name string, n New) (*Inode, error) {
	if !i.isDir() {
		return nil, syscall.ENOTDIR
	}
	if err := checkName(name); err != nil {
		return nil, err
	}
	if name == "." || name == ".." {
		return nil, syscall.EEXIST
	}
	var child *Inode
	err := i.fs.again(func() error {
		h, err := i.fs.begin(nameCredits)
		if err != nil {
			return err
		}
		i.mu.Lock()
		child, err = i.create(h, name, n)
		i.mu.Unlock()
		h.end(err)
		return err
	})
	return child, err
}

func (i *Inode) create(h *handle, name string, n New) (*Inode, error) {
	if err := i.openLive(); err != nil {
		return nil, err
	}
	if i.dir.names[name] != nil {
		return nil, syscall.EEXIST
	}
	links := uint16(1)
	dir := n.Mode&syscall.S_IFMT == syscall.S_IFDIR
	if dir {
		if links = 2; !i.canIncLinks() {
			return nil, syscall.EMLINK
		}
	}
	child, err := i.fs.newInode(h, i, n, links)
	if err != nil {
		return nil, err
	}
	if err := i.addEntry(h, name, child.ino, child.direntType()); err != nil {
		if uerr := child.unmake(h); uerr != nil {
			return nil, uerr
		}
		return nil, err
	}
	if dir {
		i.incLinks()
	}
	return child, i.touched(h)
}

// CreateTmp makes a nameless inode (O_TMPFILE) with a reference; Link may name it.
func (fs *FS) CreateTmp(n New) (*Inode, error) {
	if n.Mode&syscall.S_IFMT == syscall.S_IFDIR {
		return nil, syscall.EISDIR
	}
	var i *Inode
	err := fs.again(func() (err error) {
		i, err = fs.createTmp(n)
		return err
	})
	return i, err
}

func (fs *FS) createTmp(n New) (*Inode, error) {
	h, err := fs.begin(nameCredits)
	if err != nil {
		return nil, err
	}
	fs.orphanMu.Lock()
	fs.root.mu.RLock()
	i, err := fs.newInode(h, fs.root, n, 0)
	fs.root.mu.RUnlock()
	if err == nil {
		i.mu.Lock()
		i.linkable = true
		if err = i.addOrphan(h); err == nil {
			err = i.flush(h)
		}
		i.mu.Unlock()
	}
	fs.orphanMu.Unlock()
	h.end(err)
	return i, err
}

// Link adds a name for target: not a directory (EPERM), and with links already or from CreateTmp.
func (i *Inode) Link(name string, target *Inode) error {
	if !i.isDir() {
		return syscall.ENOTDIR
	}
	if err := checkName(name); err != nil {
		return err
	}
	if target.isDir() {
		return syscall.EPERM
	}
	if name == "." || name == ".." {
		return syscall.EEXIST
	}
	return i.fs.again(func() error {
		h, err := i.fs.begin(nameCredits)
		if err != nil {
			return err
		}
		i.fs.orphanMu.Lock()
		err = i.link(h, name, target)
		i.fs.orphanMu.Unlock()
		h.end(err)
		return err
	})
}

func (i *Inode) link(h *handle, name string, target *Inode) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.openLive(); err != nil {
		return err
	}
	if i.dir.names[name] != nil {
		return syscall.EEXIST
	}
	target.mu.RLock()
	links, linkable := target.links(), target.linkable
	target.mu.RUnlock()
	switch {
	case links == 0 && !linkable:
		return syscall.ENOENT
	case links >= MaxLinks:
		return syscall.EMLINK
	}
	if err := i.addEntry(h, name, target.ino, target.direntType()); err != nil {
		return err
	}
	// Links changes under the lock of a directory that names it or under orphanMu,
	// which is held: it is still what was read, or another Link's which held it too.
	if links == 0 {
		if err := target.removeOrphan(h); err != nil {
			return err
		}
	}
	target.mu.Lock()
	target.setLinks(target.links() + 1)
	target.linkable = false
	target.touch(SetCtime)
	err := target.flush(h)
	target.mu.Unlock()
	if err != nil {
		return err
	}
	return i.touched(h)
}

// dropLink counts a link of t down, after its entry is gone. t.mu is held exclusively.
func (t *Inode) dropLink(h *handle) error {
	n := t.links()
	if t.isDir() {
		n = 1
	}
	if n == 0 {
		return corruptf("inode %d: more names than links", t.ino)
	}
	t.setLinks(n - 1)
	t.touch(SetCtime)
	if n == 1 {
		if err := t.addOrphan(h); err != nil {
			return err
		}
	}
	return t.flush(h)
}

// Unlink removes a name that is not a directory's (EISDIR).
func (i *Inode) Unlink(name string) error { return i.remove(name, false) }

// Rmdir removes an empty directory.
func (i *Inode) Rmdir(name string) error { return i.remove(name, true) }

func (i *Inode) remove(name string, dir bool) error {
	if !i.isDir() {
		return syscall.ENOTDIR
	}
	if len(name) > MaxNameLen {
		return syscall.ENAMETOOLONG
	}
	h, err := i.fs.begin(nameCredits)
	if err != nil {
		return err
	}
	i.fs.orphanMu.Lock()
	i.mu.Lock()
	target, err := i.removeLocked(h, name, dir)
	i.mu.Unlock()
	i.fs.orphanMu.Unlock()
	h.end(err)
	if target != nil {
		target.DecRef()
	}
	return err
}

// removeLocked gives the inode the name was of, for the caller to drop.
func (i *Inode) removeLocked(h *handle, name string, dir bool) (*Inode, error) {
	if err := i.openLive(); err != nil {
		return nil, err
	}
	e := i.dir.names[name]
	if e == nil {
		return nil, syscall.ENOENT
	}
	t, err := i.fs.iget(e.ino)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case dir && !t.isDir():
		return t, syscall.ENOTDIR
	case !dir && t.isDir():
		return t, syscall.EISDIR
	case dir:
		if err := t.checkEmpty(); err != nil {
			return t, err
		}
	}
	if err := i.removeEntry(h, e); err != nil {
		return t, err
	}
	if err := t.dropLink(h); err != nil {
		return t, err
	}
	if dir {
		i.decLinks()
	}
	return t, i.touched(h)
}

// checkEmpty says ENOTEMPTY for a directory with entries. i.mu is held exclusively.
func (i *Inode) checkEmpty() error {
	if err := i.openDir(); err != nil {
		return err
	}
	if len(i.dir.names) > 0 {
		return syscall.ENOTEMPTY
	}
	return nil
}

// ancestors gives the numbers of a directory and of all above it. Renames are
// locked out, so parents stay; no inode lock is held.
func (fs *FS) ancestors(d *Inode) (map[uint32]bool, error) {
	out := map[uint32]bool{}
	ino := d.ino
	for !out[ino] {
		out[ino] = true
		if ino == rootIno {
			return out, nil
		}
		i, err := fs.iget(ino)
		if err != nil {
			if d.ino == ino { // removed and still open
				return out, nil
			}
			return nil, err
		}
		up, err := i.Parent()
		i.DecRef()
		if err != nil {
			return nil, err
		}
		ino = up
	}
	return nil, corruptf("directory %d: its parents form a loop at %d", d.ino, ino)
}

// Rename moves odir/oname to ndir/nname; flags are Rename….
func (fs *FS) Rename(odir *Inode, oname string, ndir *Inode, nname string, flags uint32) error {
	if !odir.isDir() || !ndir.isDir() {
		return syscall.ENOTDIR
	}
	if flags&^(RenameNoReplace|RenameExchange|RenameWhiteout) != 0 ||
		flags&RenameExchange != 0 && flags != RenameExchange {
		return syscall.EINVAL
	}
	for _, name := range []string{oname, nname} {
		if err := checkName(name); err != nil {
			return err
		}
	}
	fs.renameMu.Lock()
	defer fs.renameMu.Unlock()
	return fs.again(func() error {
		m := move{fs: fs, odir: odir, ndir: ndir, oname: oname, nname: nname, flags: flags}
		return m.rename()
	})
}

// rename does the rename in a handle of its own. renameMu is held.
func (m *move) rename() error {
	fs, odir, ndir := m.fs, m.odir, m.ndir
	var err error
	if m.aboveOld, err = fs.ancestors(odir); err != nil {
		return err
	}
	if m.aboveNew, err = fs.ancestors(ndir); err != nil {
		return err
	}
	h, err := fs.begin(nameCredits)
	if err != nil {
		return err
	}
	fs.orphanMu.Lock()
	first, second := odir, ndir // an ancestor is locked before what is below it
	if m.aboveOld[ndir.ino] {
		first, second = ndir, odir
	}
	first.mu.Lock()
	if second != first {
		second.mu.Lock()
	}
	err = m.run(h)
	if second != first {
		second.mu.Unlock()
	}
	first.mu.Unlock()
	fs.orphanMu.Unlock()
	h.end(err)
	for _, i := range []*Inode{m.src, m.dst, m.white} {
		if i != nil {
			i.DecRef()
		}
	}
	return err
}

// move is one rename under way.
type move struct {
	fs                 *FS
	odir, ndir         *Inode
	oname, nname       string
	flags              uint32
	aboveOld, aboveNew map[uint32]bool // ancestors, with the directories themselves
	src, dst           *Inode          // what moves and what is in its way, referenced
	white              *Inode          // the whiteout left behind
	from, to           *dirent         // their entries; to is nil when the name is free
}

// run does the rename with both directories locked.
func (m *move) run(h *handle) error {
	if err := m.odir.openLive(); err != nil {
		return err
	}
	if err := m.ndir.openLive(); err != nil {
		return err
	}
	m.from, m.to = m.odir.dir.names[m.oname], m.ndir.dir.names[m.nname]
	switch {
	case m.from == nil:
		return syscall.ENOENT
	case m.to != nil && m.flags&RenameNoReplace != 0:
		return syscall.EEXIST
	case m.to == nil && m.flags&RenameExchange != 0:
		return syscall.ENOENT
	}
	var err error
	if m.src, err = m.fs.iget(m.from.ino); err != nil {
		return err
	}
	if m.to != nil {
		if m.dst, err = m.fs.iget(m.to.ino); err != nil {
			return err
		}
		if m.src == m.dst { // two names of one inode: nothing to do
			return nil
		}
	}
	if m.aboveNew[m.src.ino] {
		return syscall.EINVAL
	}
	if m.flags&RenameExchange != 0 {
		return m.exchange(h)
	}
	if m.dst != nil {
		switch {
		case m.aboveOld[m.dst.ino]:
			return syscall.ENOTEMPTY
		case m.src.isDir() && !m.dst.isDir():
			return syscall.ENOTDIR
		case !m.src.isDir() && m.dst.isDir():
			return syscall.EISDIR
		}
	}
	return m.replace(h)
}

// replace moves src over dst or to a free name.
func (m *move) replace(h *handle) error {
	across := m.src.isDir() && m.odir != m.ndir
	if across && m.dst == nil && !m.ndir.canIncLinks() {
		return syscall.EMLINK
	}
	if m.dst != nil {
		m.dst.mu.Lock()
		defer m.dst.mu.Unlock()
		if m.dst.isDir() {
			if err := m.dst.checkEmpty(); err != nil {
				return err
			}
		}
	}
	m.src.mu.Lock()
	defer m.src.mu.Unlock()
	if across {
		if err := m.src.openDir(); err != nil {
			return err
		}
	}
	// What can fail for lack of space comes first.
	if m.flags&RenameWhiteout != 0 {
		white, err := m.fs.newInode(h, m.odir, New{Mode: syscall.S_IFCHR}, 1)
		if err != nil {
			return err
		}
		m.white = white
	}
	var err error
	if m.to != nil {
		err = m.ndir.setEntry(h, m.to, m.src.ino, m.src.direntType())
	} else {
		err = m.ndir.addEntry(h, m.nname, m.src.ino, m.src.direntType())
	}
	if err != nil {
		if w := m.white; w != nil {
			m.white = nil
			if uerr := w.unmake(h); uerr != nil {
				return uerr
			}
		}
		return err
	}
	if m.white != nil {
		err = m.odir.setEntry(h, m.from, m.white.ino, TypeChar)
	} else {
		err = m.odir.removeEntry(h, m.from)
	}
	if err != nil {
		return err
	}
	if across {
		if err := m.src.setParent(h, m.ndir.ino); err != nil {
			return err
		}
		m.odir.decLinks()
		m.ndir.incLinks()
	}
	m.src.touch(SetCtime)
	if err := m.src.flush(h); err != nil {
		return err
	}
	if m.dst != nil {
		if err := m.dst.dropLink(h); err != nil {
			return err
		}
		if m.dst.isDir() {
			m.ndir.decLinks()
		}
	}
	return m.touchDirs(h)
}

// exchange swaps two names.
func (m *move) exchange(h *handle) error {
	if m.aboveOld[m.dst.ino] {
		return syscall.EINVAL
	}
	across := m.odir != m.ndir
	srcDir, dstDir := m.src.isDir(), m.dst.isDir()
	if across && (srcDir && !dstDir && !m.ndir.canIncLinks() || dstDir && !srcDir && !m.odir.canIncLinks()) {
		return syscall.EMLINK
	}
	m.dst.mu.Lock()
	defer m.dst.mu.Unlock()
	m.src.mu.Lock()
	defer m.src.mu.Unlock()
	srcIno, srcType, dstIno, dstType := m.src.ino, m.src.direntType(), m.dst.ino, m.dst.direntType()
	if err := m.ndir.setEntry(h, m.to, srcIno, srcType); err != nil {
		return err
	}
	if err := m.odir.setEntry(h, m.from, dstIno, dstType); err != nil {
		return err
	}
	if across {
		for _, x := range []struct {
			i        *Inode
			from, to *Inode
		}{{m.src, m.odir, m.ndir}, {m.dst, m.ndir, m.odir}} {
			if !x.i.isDir() {
				continue
			}
			if err := x.i.openDir(); err != nil {
				return err
			}
			if err := x.i.setParent(h, x.to.ino); err != nil {
				return err
			}
			if srcDir != dstDir {
				x.from.decLinks()
				x.to.incLinks()
			}
		}
	}
	for _, i := range []*Inode{m.src, m.dst} {
		i.touch(SetCtime)
		if err := i.flush(h); err != nil {
			return err
		}
	}
	return m.touchDirs(h)
}

func (m *move) touchDirs(h *handle) error {
	if err := m.odir.touched(h); err != nil {
		return err
	}
	if m.ndir == m.odir {
		return nil
	}
	return m.ndir.touched(h)
}
