package ext4

import "syscall"

// The on-disk list of inodes without a name that are still open: s_last_orphan
// is the first, i_dtime of each the number of the next. A volume stopped
// without Close is repaired from it. orphan_file volumes have a second place
// for orphans; this driver always uses the list, which every reader knows.
//
// FS.orphanMu guards list and links. It is taken after begin and before any
// inode lock, since taking one inode out changes the one before it.

// addOrphan puts i at the head of the list. i.mu is held exclusively; the caller
// flushes the inode.
func (i *Inode) addOrphan() {
	fs := i.fs
	if i.orphan {
		return
	}
	fs.sbMu.Lock()
	raw := fs.changeSuper()
	le.PutUint32(i.raw[offDtime:], le.Uint32(raw[sLastOrphan:]))
	le.PutUint32(raw[sLastOrphan:], i.ino)
	fs.sbMu.Unlock()
	i.orphan = true
	i.nextOrphan, i.prevOrphan = fs.orphans, nil
	if fs.orphans != nil {
		fs.orphans.prevOrphan = i
	}
	fs.orphans = i
}

// setDtime stores i_dtime.
func (i *Inode) setDtime(h *handle, v uint32) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	le.PutUint32(i.raw[offDtime:], v)
	return i.flush(h)
}

// removeOrphan takes i out of the list. No inode lock is held.
func (i *Inode) removeOrphan(h *handle) error {
	fs := i.fs
	if !i.orphan {
		return nil
	}
	next, prev := i.nextOrphan, i.prevOrphan
	nextIno := uint32(0)
	if next != nil {
		nextIno = next.ino
		next.prevOrphan = prev
	}
	i.orphan, i.nextOrphan, i.prevOrphan = false, nil, nil
	if prev != nil {
		prev.nextOrphan = next
		if err := prev.setDtime(h, nextIno); err != nil {
			return err
		}
	} else {
		fs.orphans = next
		fs.sbMu.Lock()
		le.PutUint32(fs.changeSuper()[sLastOrphan:], nextIno)
		fs.sbMu.Unlock()
	}
	return i.setDtime(h, 0)
}

// destroy frees an inode without links and references, which is in the cache no more.
func (i *Inode) destroy() error {
	fs := i.fs
	if fs.ReadOnly() {
		return syscall.EROFS
	}
	i.ReleaseWindow()
	if fs.beforeFree != nil && i.isRegular() {
		bs := fs.BlockSize()
		fs.beforeFree(i, 0, (i.Size()+bs-1)&^(bs-1))
	}
	h, err := fs.begin()
	if err != nil {
		return err
	}
	fs.orphanMu.Lock()
	err = i.removeOrphan(h)
	if err == nil {
		i.mu.Lock()
		err = i.erase(h)
		i.mu.Unlock()
	}
	fs.orphanMu.Unlock()
	h.end(err)
	return err
}

// erase frees all that belongs to the inode and the inode. i.mu is held exclusively.
func (i *Inode) erase(h *handle) error {
	if i.hasExtents() {
		freed, err := i.removeRange(h, 0, endOfFile)
		if err != nil {
			return err
		}
		if err := i.fs.freeRuns(h, freed, i.isDir()); err != nil {
			return err
		}
	} else if !i.isSymlink() && (i.isRegular() || i.isDir()) && i.sectors() > 0 {
		return corruptf("inode %d: has blocks but no extents", i.ino)
	}
	if err := i.dropXattrBlock(h); err != nil {
		return err
	}
	i.setSize(0)
	i.setLinks(0)
	le.PutUint32(i.raw[offDtime:], uint32(i.fs.now().Unix()))
	if err := i.flush(h); err != nil {
		return err
	}
	return i.fs.freeInode(h, i.ino, i.isDir())
}

// freeRuns frees blocks; those of metadata are forgotten first.
func (fs *FS) freeRuns(h *handle, freed []run, meta bool) error {
	for _, r := range freed {
		if meta {
			for k := range r.n {
				fs.bufs.forget(r.start + uint64(k))
			}
		}
		if err := fs.freeBlocks(h, r); err != nil {
			return err
		}
	}
	return nil
}
