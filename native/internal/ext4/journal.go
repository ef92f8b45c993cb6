package ext4

import (
	"errors"
	"fmt"
	"syscall"

	"gvx.dev/gvx/native/internal/jbd2"
)

// A handle brackets one change of the file system: every metadata block it
// touches is obtained from it. On a volume with a journal it is one of jbd2's, so
// that the change is in one transaction; without one it only keeps Sync out while
// the change is half done.
//
// begin is called before any inode lock is taken and never nested: it may wait
// for a commit.
type handle struct {
	fs    *FS
	j     *jbd2.Handle
	freed []run // blocks given back; see release
}

// The most metadata blocks that kinds of changes touch. A volume whose journal is
// too small for such numbers has transactions of one or two operations.
const (
	inodeCredits = 8  // an inode's table block, the superblock
	dataCredits  = 40 // mapping one extent: the tree may be split at every level
	nameCredits  = 64 // two directories that grow, with their indexes
	freeCredits  = 64 // a step of freeing; see removeRange
	freeReserve  = 24 // of them, for what comes when all blocks are gone
)

// begin starts a change of at most credits blocks; EROFS when the volume may not be written.
func (fs *FS) begin(credits int) (*handle, error) {
	if fs.readOnly.Load() {
		return nil, syscall.EROFS
	}
	if fs.journal != nil {
		j, err := fs.journal.Begin(credits)
		if err != nil {
			return nil, syscall.EROFS // what made it fail is on record
		}
		return &handle{fs: fs, j: j}, nil
	}
	if fs.bufs.dirtyBytes() > fs.dirtyLimit {
		if err := fs.Sync(); err != nil {
			return nil, err
		}
	}
	fs.barrier.RLock()
	if fs.readOnly.Load() { // Sync or another handle failed meanwhile
		fs.barrier.RUnlock()
		return nil, syscall.EROFS
	}
	return &handle{fs: fs}, nil
}

// end finishes the change. A fatal error makes the volume read-only, because
// what is in memory can no longer be trusted.
func (h *handle) end(err error) {
	tid := h.close(err)
	h.fs.release(tid, h.freed)
}

// close is end without giving back what was freed: the caller calls release,
// when nobody looks at the blocks any more.
func (h *handle) close(err error) (tid uint64) {
	if err != nil && isFatal(err) {
		h.fs.abort(err)
	}
	if h.j == nil {
		h.fs.barrier.RUnlock()
		return 0
	}
	tid = h.j.Tid()
	h.j.End()
	return tid
}

// tid is the transaction the change belongs to, 0 without a journal.
func (h *handle) tid() uint64 {
	if h.j == nil {
		return 0
	}
	return h.j.Tid()
}

// room tells whether n more blocks were announced.
func (h *handle) room(n int) bool { return h.j == nil || h.j.Room() >= n }

// write gives a metadata block for changing.
func (h *handle) write(blk uint64) (*buffer, error) {
	if h.j == nil {
		return h.fs.bufs.write(blk)
	}
	b, err := h.fs.bufs.hold(blk)
	if err == nil {
		h.j.Get(&b.jb)
	}
	b.held.Add(-1)
	return b, err
}

// create gives a zeroed metadata block that is written whole.
func (h *handle) create(blk uint64) *buffer {
	if h.j == nil {
		return h.fs.bufs.create(blk)
	}
	b := h.fs.bufs.put(blk, make([]byte, h.fs.sb.blockSize), bufHeld)
	h.j.Get(&b.jb)
	b.held.Add(-1)
	return b
}

// forget drops a freed metadata block, so that what it held never overwrites
// what comes after it.
func (h *handle) forget(blk uint64) {
	b := h.fs.bufs.forget(blk)
	switch {
	case h.j == nil:
	case b == nil:
		h.j.Forget(blk, nil)
	default:
		h.j.Forget(blk, &b.jb)
	}
}

// abort refuses further writes for good.
func (fs *FS) abort(err error) {
	fs.noteFailure(err)
	if fs.journal != nil {
		fs.journal.Abort(err)
	}
}

func (fs *FS) noteFailure(err error) {
	fs.failMu.Lock()
	if fs.failure == nil {
		fs.failure = err
	}
	fs.failMu.Unlock()
	fs.readOnly.Store(true)
}

// openJournal opens the journal of a volume that is going to be written.
func (fs *FS) openJournal(o Options) error {
	runs, err := fs.journalRuns()
	if err != nil {
		return err
	}
	fs.journal, err = jbd2.Open(fs.dev, runs, jbd2.Config{
		BlockSize:    fs.sb.blockSize,
		Blocks:       fs.sb.blocksCount,
		Durable:      fs.durable,
		Interval:     o.CommitInterval,
		Now:          fs.now,
		BeforeCommit: fs.beforeCommit,
		AfterCommit:  fs.afterCommit,
		OnAbort:      fs.noteFailure,
	})
	if err != nil {
		return fmt.Errorf("ext4: %w", err)
	}
	return nil
}

// journalRuns gives the blocks of the journal's inode.
func (fs *FS) journalRuns() ([]jbd2.Run, error) {
	j, err := fs.iget(fs.sb.journalIno)
	if err != nil {
		return nil, fmt.Errorf("ext4: journal: %w", err)
	}
	defer j.DecRef()
	if !j.isRegular() {
		return nil, corruptf("journal inode %d is not a regular file", j.ino)
	}
	var runs []jbd2.Run
	blocks := uint64(j.Size()) >> fs.sb.blockBits
	for at := uint64(0); at < blocks; {
		e, hole, err := j.find(uint32(at))
		if err != nil {
			return nil, fmt.Errorf("ext4: journal: %w", err)
		}
		if hole || e.unwritten {
			return nil, corruptf("journal inode %d has a hole at its block %d", j.ino, at)
		}
		n := uint32(min(uint64(e.n), blocks-at))
		if k := len(runs) - 1; k >= 0 && runs[k].Start+uint64(runs[k].Count) == e.phys {
			runs[k].Count += n
		} else {
			runs = append(runs, jbd2.Run{Start: e.phys, Count: n})
		}
		at += uint64(n)
	}
	return runs, nil
}

// beforeCommit brings what is only in memory into the running transaction.
func (fs *FS) beforeCommit(j *jbd2.Handle) error {
	h := &handle{fs: fs, j: j}
	if !fs.mountNoted {
		fs.mountNoted = true
		fs.sbMu.Lock()
		defer fs.sbMu.Unlock()
		raw, err := fs.changeSuper(h)
		if err != nil {
			return err
		}
		le.PutUint16(raw[sMntCount:], le.Uint16(raw[sMntCount:])+1)
		putTime40(raw, sMtime, sMtimeHi, fs.now().Unix())
		fs.superTouched.Store(true)
	}
	if err := fs.storeGroups(h); err != nil {
		return err
	}
	if fs.superTouched.Swap(false) {
		fs.sealSuper()
	}
	return nil
}

// afterCommit gives back blocks that transactions up to tid have freed.
func (fs *FS) afterCommit(tid uint64) {
	a := &fs.alloc
	a.mu.Lock()
	defer a.mu.Unlock()
	a.released = tid
	kept := a.freed[:0]
	for _, f := range a.freed {
		if f.tid <= tid {
			fs.reuse(f.run)
		} else {
			kept = append(kept, f)
		}
	}
	a.freed = kept
}

// release gives back the blocks that a closed handle of transaction tid has
// freed, when that is committed: until then a crash would bring their old owner
// back. Without a journal nothing is promised; only what is worth being punched
// waits for the next Sync.
func (fs *FS) release(tid uint64, freed []run) {
	if len(freed) == 0 {
		return
	}
	a := &fs.alloc
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, r := range freed {
		// What is committed already, afterCommit has looked for in vain.
		if fs.journal != nil && tid <= a.released || fs.journal == nil && !fs.worthDiscarding(r) {
			fs.reuse(r)
		} else {
			a.freed = append(a.freed, freedRun{tid, r})
		}
	}
}

// reclaim makes blocks that wait for a commit available; false when there are none.
func (fs *FS) reclaim() bool {
	if fs.alloc.waiting.Load() == 0 || fs.Sync() != nil {
		return false
	}
	fs.awaitDiscards()
	return true
}

// again runs an operation once more when it lacked space that a commit can give back.
func (fs *FS) again(op func() error) error {
	err := op()
	for tries := 0; tries < 2 && errors.Is(err, syscall.ENOSPC) && fs.reclaim(); tries++ {
		err = op()
	}
	return err
}
