package ext4

import "syscall"

// The on-disk list of inodes without a name that are still open, and of those
// being cut shorter in several transactions: s_last_orphan is the first, i_dtime
// of each the number of the next. Recovery deletes the ones and finishes the
// others. orphan_file volumes have a second place for orphans; this driver always
// uses the list, which every reader knows.
//
// FS.orphanMu guards list and links. It is taken after begin and before any
// inode lock, since taking one inode out changes the one before it.

// addOrphan puts i at the head of the list. i.mu is held exclusively; the caller
// flushes the inode.
func (i *Inode) addOrphan(h *handle) error {
	fs := i.fs
	if i.orphan {
		return nil
	}
	fs.sbMu.Lock()
	raw, err := fs.changeSuper(h)
	if err == nil {
		le.PutUint32(i.raw[offDtime:], le.Uint32(raw[sLastOrphan:]))
		le.PutUint32(raw[sLastOrphan:], i.ino)
	}
	fs.sbMu.Unlock()
	if err != nil {
		return err
	}
	i.orphan = true
	i.nextOrphan, i.prevOrphan = fs.orphans, nil
	if fs.orphans != nil {
		fs.orphans.prevOrphan = i
	}
	fs.orphans = i
	return nil
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
		raw, err := fs.changeSuper(h)
		if err == nil {
			le.PutUint32(raw[sLastOrphan:], nextIno)
		}
		fs.sbMu.Unlock()
		if err != nil {
			return err
		}
	}
	return i.setDtime(h, 0)
}

// settle ends what keeps i in the list, when nobody uses the volume any more.
func (i *Inode) settle() error {
	i.mu.RLock()
	links, size := i.links(), i.size()
	i.mu.RUnlock()
	if links > 0 { // a truncation that failed half way
		return i.cut(size, size)
	}
	i.fs.icMu.Lock()
	delete(i.fs.inodes, i.ino)
	i.fs.icMu.Unlock()
	return i.destroy()
}

// destroy frees an inode without links and references, which is in the cache no
// more: its blocks in as many steps as they need, the rest with the last of them.
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
	for done := false; !done; {
		h, err := fs.begin(freeCredits)
		if err != nil {
			return err
		}
		i.mu.Lock()
		if done, err = i.eraseBlocks(h, false); !done && err == nil {
			err = i.flush(h)
		}
		i.mu.Unlock()
		if done && err == nil {
			fs.orphanMu.Lock()
			if err = i.removeOrphan(h); err == nil {
				i.mu.Lock()
				err = i.eraseRest(h)
				i.mu.Unlock()
			}
			fs.orphanMu.Unlock()
		}
		h.end(err)
		if err != nil {
			return err
		}
	}
	return nil
}

// erase frees all that belongs to the inode and the inode, which is small. i.mu
// is held exclusively.
func (i *Inode) erase(h *handle) error {
	if _, err := i.eraseBlocks(h, true); err != nil {
		return err
	}
	return i.eraseRest(h)
}

// eraseBlocks frees the blocks of the inode's contents: all of them, or as many
// as h has room for; done tells whether none is left.
func (i *Inode) eraseBlocks(h *handle, all bool) (done bool, err error) {
	if i.hasExtents() {
		at, err := i.removeRange(h, 0, endOfFile, all)
		return at == endOfFile, err
	}
	if !i.isSymlink() && (i.isRegular() || i.isDir()) && i.sectors() > 0 {
		return true, corruptf("inode %d: has blocks but no extents", i.ino)
	}
	return true, nil
}

// eraseRest frees the inode after its blocks.
func (i *Inode) eraseRest(h *handle) error {
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
				h.forget(r.start + uint64(k))
			}
		}
		if err := fs.freeBlocks(h, r); err != nil {
			return err
		}
	}
	return nil
}
