package ext4

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"gvx.dev/gvx/native/internal/blockdev"
	"gvx.dev/gvx/native/internal/jbd2"
)

// FS is an open volume.
type FS struct {
	// Never change after Open.
	dev        blockdev.Device
	sb         *super
	bufs       *bufferCache
	groups     []*group
	now        func() time.Time
	beforeFree func(*Inode, int64, int64)
	durable    bool
	dirtyLimit int64
	root       *Inode
	readOnlyBy string // why a writable open was refused writing, "" otherwise
	overhead   uint64 // blocks no file can have

	// journal is where changes of metadata go, nil on a volume without one (and on
	// one that is not written). Never changes after Open.
	journal      *jbd2.Journal
	mountNoted   bool        // this mount is counted in the superblock; guarded by the journal's barrier
	superTouched atomic.Bool // the superblock's bytes differ from their checksum

	alloc     allocator
	noDiscard atomic.Bool

	// barrier is held shared by handles and exclusively by Sync on a volume without
	// a journal (jbd2 has its own). It comes before every other lock except renameMu
	// and Inode.io.
	barrier sync.RWMutex

	// renameMu serialises renames, which alone change the parent of a directory.
	renameMu sync.Mutex

	// orphanMu guards the orphan list and keeps inodes from losing or regaining
	// their last link; after barrier, before Inode.mu.
	orphanMu sync.Mutex
	orphans  *Inode // head of the on-disk list, linked by Inode.nextOrphan

	// sbMu guards the changing part of the superblock; after Inode.mu.
	sbMu    sync.Mutex
	superB  *buffer // block of the superblock, pinned
	superAt int     // offset of the superblock in it

	// xattrMu guards the reference counts of shared xattr blocks; after Inode.mu.
	xattrMu sync.Mutex

	// icMu guards the inode cache and every reference count. It is a leaf.
	icMu   sync.Mutex
	inodes map[uint32]*Inode
	idle   map[uint32]*Inode // of them, those without references

	readOnly atomic.Bool
	closed   atomic.Bool
	failMu   sync.Mutex
	failure  error // what made the volume read-only; guarded by failMu
}

const (
	defaultCache = 32 << 20
	maxIdle      = 8192 // unreferenced inodes kept
)

// Open reads the volume on dev. A volume that can be read but not written opens
// read-only (see ReadOnly); one that is not clean is refused for writing:
// replay and repair are others' work. Errors name feature, state or damage.
func Open(dev blockdev.Device, o Options) (*FS, error) {
	sb, raw, err := readSuper(dev)
	if err != nil {
		return nil, err
	}
	because, err := sb.checkFeatures()
	if err != nil {
		return nil, err
	}
	if o.CacheBytes <= 0 {
		o.CacheBytes = defaultCache
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	fs := &FS{
		dev: dev, sb: sb, now: o.Now, beforeFree: o.BeforeFree, durable: o.Durable,
		bufs:       newBufferCache(dev, sb.blockSize, o.CacheBytes),
		dirtyLimit: max(o.CacheBytes, 4<<20),
		inodes:     map[uint32]*Inode{},
		idle:       map[uint32]*Inode{},
	}
	fs.noDiscard.Store(o.NoDiscard)
	fs.alloc.windows = map[*Inode]struct{}{}
	fs.alloc.punched.L = &fs.alloc.mu
	fs.readOnly.Store(o.ReadOnly)
	if !o.ReadOnly && because != "" {
		fs.readOnlyBy = because
		fs.readOnly.Store(true)
	}
	if !fs.readOnly.Load() {
		if err := checkClean(sb, raw); err != nil {
			return nil, err
		}
	}
	if err := fs.loadGroups(); err != nil {
		return nil, err
	}
	superBlk := uint64(superOffset / sb.blockSize)
	if fs.superB, err = fs.bufs.readPinned(superBlk); err != nil {
		return nil, err
	}
	fs.superAt = superOffset - int(superBlk)*sb.blockSize
	if sb.compat&compatHasJournal != 0 && !fs.readOnly.Load() {
		if err := fs.openJournal(o); err != nil {
			return nil, err
		}
	}
	if fs.root, err = fs.iget(rootIno); err != nil {
		return nil, err
	}
	if !fs.root.isDir() {
		return nil, corruptf("inode %d: the root is not a directory", rootIno)
	}
	fs.overhead = fs.countOverhead()
	if !fs.readOnly.Load() {
		if err := fs.markOpen(); err != nil {
			return nil, err
		}
	}
	return fs, nil
}

// checkClean refuses a volume that needs replay or repair.
func checkClean(sb *super, raw []byte) error {
	switch {
	case sb.incompat&incompatRecover != 0:
		return fmt.Errorf("ext4: the journal needs recovery (needs_recovery is set): %w", syscall.EUCLEAN)
	case le.Uint16(raw[sState:])&stateError != 0:
		return fmt.Errorf("ext4: the volume is marked as having errors: %w", syscall.EUCLEAN)
	case le.Uint16(raw[sState:])&stateValid == 0:
		return fmt.Errorf("ext4: the volume was not closed cleanly (state %#x): %w", le.Uint16(raw[sState:]), syscall.EUCLEAN)
	case le.Uint32(raw[sLastOrphan:]) != 0:
		return fmt.Errorf("ext4: the volume has orphaned inodes, first %d: %w", le.Uint32(raw[sLastOrphan:]), syscall.EUCLEAN)
	}
	return nil
}

// countOverhead counts the blocks of superblocks, descriptors, bitmaps, inode
// tables and journal.
func (fs *FS) countOverhead() uint64 {
	sb := fs.sb
	n := sb.firstDataBlock
	for g := range sb.groups {
		n += 2 + sb.inodeTableBlocks()
		if sb.incompat&incompatMetaBG == 0 {
			n += uint64(sb.baseMeta(g))
		}
	}
	if sb.journalIno != 0 && sb.compat&compatHasJournal != 0 {
		if j, err := fs.iget(sb.journalIno); err == nil {
			n += uint64(j.Size()) >> sb.blockBits
			j.DecRef()
		}
	}
	return min(n, sb.blocksCount)
}

// changeSuper gives the superblock's bytes for changing within h. fs.sbMu is held.
func (fs *FS) changeSuper(h *handle) ([]byte, error) {
	b, err := h.write(fs.superB.blk) // pinned, so this is fs.superB
	if err != nil {
		return nil, err
	}
	fs.superTouched.Store(true)
	return fs.superBytes(b), nil
}

func (fs *FS) superBytes(b *buffer) []byte { return b.data[fs.superAt : fs.superAt+superSize] }

// sealSuper brings counts and checksum of the superblock, which is going to be
// written, up to date. Nobody else may be changing it.
func (fs *FS) sealSuper() {
	raw := fs.superBytes(fs.superB)
	fs.alloc.mu.Lock()
	le.PutUint32(raw[sFreeBlocksLo:], uint32(fs.alloc.freeBlocks))
	if fs.sb.incompat&incompat64bit != 0 {
		le.PutUint32(raw[sFreeBlocksHi:], uint32(fs.alloc.freeBlocks>>32))
	}
	le.PutUint32(raw[sFreeInodes:], uint32(fs.alloc.freeInodes))
	fs.alloc.mu.Unlock()
	putTime40(raw, sWtime, sWtimeHi, fs.now().Unix())
	fs.sumSuper(raw)
}

func (fs *FS) sumSuper(raw []byte) {
	if fs.sb.has(roCompatMetadataCsum) {
		le.PutUint32(raw[sChecksum:], superChecksum(raw))
	}
}

// countsStored tells whether the superblock has the right counts of what is free.
func (fs *FS) countsStored() bool {
	raw := fs.superBytes(fs.superB)
	blocks := uint64(le.Uint32(raw[sFreeBlocksLo:]))
	if fs.sb.incompat&incompat64bit != 0 {
		blocks |= uint64(le.Uint32(raw[sFreeBlocksHi:])) << 32
	}
	fs.alloc.mu.Lock()
	defer fs.alloc.mu.Unlock()
	return blocks == fs.alloc.freeBlocks && uint64(le.Uint32(raw[sFreeInodes:])) == fs.alloc.freeInodes
}

func putTime40(raw []byte, lo, hi int, sec int64) {
	le.PutUint32(raw[lo:], uint32(sec))
	raw[hi] = byte(sec >> 32)
}

// markOpen makes the volume unclean on the device, so that a stop without Close shows.
func (fs *FS) markOpen() error {
	if fs.journal != nil {
		return fs.setRecover(true)
	}
	fs.barrier.Lock()
	defer fs.barrier.Unlock()
	fs.sbMu.Lock()
	raw, err := fs.changeSuper(&handle{fs: fs})
	if err != nil {
		fs.sbMu.Unlock()
		return err
	}
	le.PutUint16(raw[sState:], le.Uint16(raw[sState:])&^stateValid)
	le.PutUint16(raw[sMntCount:], le.Uint16(raw[sMntCount:])+1)
	putTime40(raw, sMtime, sMtimeHi, fs.now().Unix())
	fs.sbMu.Unlock()
	return fs.flushLocked()
}

// setRecover changes the flag that says that the journal must be replayed, and
// nothing else, so that even a superblock cut in half between its sectors can be
// understood. It does not go through the journal, whose log is empty now.
func (fs *FS) setRecover(on bool) error {
	fs.sbMu.Lock()
	defer fs.sbMu.Unlock()
	raw := fs.superBytes(fs.superB)
	f := le.Uint32(raw[sFeatureIncompat:]) &^ incompatRecover
	if on {
		f |= incompatRecover
	}
	le.PutUint32(raw[sFeatureIncompat:], f)
	fs.sumSuper(raw)
	if _, err := fs.dev.WriteAt(raw, superOffset); err != nil {
		return fmt.Errorf("ext4: superblock: %w", err)
	}
	if fs.durable {
		return fs.dev.Flush()
	}
	return nil
}

// flushLocked writes all metadata of a volume without a journal. The barrier is
// held exclusively.
func (fs *FS) flushLocked() error {
	h := &handle{fs: fs}
	if err := fs.storeGroups(h); err != nil {
		return err
	}
	if fs.bufs.dirtyBytes() > 0 {
		fs.sbMu.Lock()
		_, err := fs.changeSuper(h)
		if err == nil {
			fs.sealSuper()
		}
		fs.sbMu.Unlock()
		if err != nil {
			return err
		}
		if err := fs.bufs.flush(); err != nil {
			return err
		}
	}
	if fs.durable {
		if err := fs.dev.Flush(); err != nil {
			return err
		}
	}
	fs.afterCommit(0)
	return nil
}

// Sync makes everything done so far durable (data is on the device already). What
// that survives is Options.Durable's matter. An error that made the volume
// read-only comes back from every call.
func (fs *FS) Sync() error {
	return fs.sync(0)
}

// sync is Sync of what transaction tid and those before it changed; of everything for 0.
func (fs *FS) sync(tid uint64) error {
	if fs.closed.Load() {
		return syscall.EBADF
	}
	if err := fs.failed(); err != nil {
		return err
	}
	if fs.readOnly.Load() {
		return nil
	}
	if fs.journal != nil {
		flushed, err := fs.journal.Commit(tid)
		if err == nil && fs.durable && !flushed { // for data written in place
			if err = fs.dev.Flush(); err != nil {
				fs.abort(err)
			}
		}
		return err
	}
	fs.barrier.Lock()
	defer fs.barrier.Unlock()
	if err := fs.failed(); err != nil {
		return err
	}
	if err := fs.flushLocked(); err != nil {
		fs.abort(err)
		return err
	}
	return nil
}

// failed is what made the volume read-only after it was opened for writing.
func (fs *FS) failed() error {
	fs.failMu.Lock()
	defer fs.failMu.Unlock()
	return fs.failure
}

// Close frees orphans whose references were never dropped, syncs and marks the
// volume clean. After a failure it leaves the volume marked unclean and says
// so. Inodes are unusable afterwards.
func (fs *FS) Close() error {
	if fs.closed.Load() {
		return nil
	}
	var errs []error
	for !fs.readOnly.Load() {
		fs.orphanMu.Lock()
		i := fs.orphans
		fs.orphanMu.Unlock()
		if i == nil {
			break
		}
		if err := i.settle(); err != nil {
			errs = append(errs, err)
			break
		}
	}
	for _, i := range fs.cached() {
		if i.untidy.Load() {
			i.tidy()
		}
	}
	failure := fs.failed()
	if fs.readOnly.Load() && failure == nil {
		fs.closed.Store(true)
		return nil
	}
	if failure == nil && len(errs) == 0 {
		if err := fs.markClean(); err != nil {
			errs = append(errs, err)
		}
	}
	fs.closed.Store(true)
	fs.readOnly.Store(true)
	if fs.journal != nil {
		fs.journal.Abandon()
	}
	fs.awaitDiscards()
	if failure != nil {
		errs = append(errs, fmt.Errorf("ext4: closed after an error, the volume needs a check: %w", failure))
	}
	return errors.Join(errs...)
}

// markClean writes everything and then, last of all, that the volume is clean.
func (fs *FS) markClean() error {
	if fs.journal == nil {
		fs.barrier.Lock()
		defer fs.barrier.Unlock()
		if err := fs.flushLocked(); err != nil {
			return err
		}
		fs.sbMu.Lock()
		raw, err := fs.changeSuper(&handle{fs: fs})
		if err == nil {
			le.PutUint16(raw[sState:], le.Uint16(raw[sState:])|stateValid)
		}
		fs.sbMu.Unlock()
		if err != nil {
			return err
		}
		return fs.flushLocked()
	}
	if !fs.countsStored() {
		h, err := fs.begin(inodeCredits)
		if err != nil {
			return err
		}
		fs.sbMu.Lock()
		_, err = fs.changeSuper(h)
		fs.sbMu.Unlock()
		h.end(err)
		if err != nil {
			return err
		}
	}
	if err := fs.journal.Close(); err != nil {
		return err
	}
	fs.awaitDiscards()
	return fs.setRecover(false)
}

// cached lists the inodes in memory.
func (fs *FS) cached() []*Inode {
	fs.icMu.Lock()
	defer fs.icMu.Unlock()
	out := make([]*Inode, 0, len(fs.inodes))
	for _, i := range fs.inodes {
		if i.loadErr == nil {
			out = append(out, i)
		}
	}
	return out
}

// Root is the root directory; the caller owns no reference and needs none.
func (fs *FS) Root() *Inode { return fs.root }

// ReadOnly tells whether writes are refused: asked for, by features (see
// ReadOnlyReason), or after an error.
func (fs *FS) ReadOnly() bool { return fs.readOnly.Load() }

// ReadOnlyReason says which feature kept a writable open from writing; "" when none did.
func (fs *FS) ReadOnlyReason() string { return fs.readOnlyBy }

// BlockSize is the block size in bytes.
func (fs *FS) BlockSize() int64 { return int64(fs.sb.blockSize) }

// Statfs gives usage figures. Blocks reserved for the super-user are not available, though
// nothing refuses them: who may use them is the caller's question.
func (fs *FS) Statfs() Statfs {
	fs.alloc.mu.Lock()
	defer fs.alloc.mu.Unlock()
	return Statfs{
		BlockSize:   int64(fs.sb.blockSize),
		Blocks:      fs.sb.blocksCount - fs.overhead,
		Free:        fs.alloc.freeBlocks,
		Avail:       fs.alloc.freeBlocks - min(fs.alloc.freeBlocks, fs.sb.reservedBlocks),
		Inodes:      uint64(fs.sb.inodesCount),
		FreeInodes:  fs.alloc.freeInodes,
		NameLen:     MaxNameLen,
		UUID:        fs.sb.uuid,
		Label:       fs.sb.label,
		TotalBlocks: fs.sb.blocksCount,
		Overhead:    fs.overhead,
	}
}

// timespec is the present time.
func (fs *FS) timespec() Timespec {
	t := fs.now()
	return Timespec{t.Unix(), uint32(t.Nanosecond())}
}
