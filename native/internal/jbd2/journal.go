package jbd2

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"gvx.dev/gvx/native/internal/blockdev"
)

// Config of Open.
type Config struct {
	// BlockSize is the volume's, in bytes, and so the log's.
	BlockSize int
	// Blocks is the size of the volume in blocks: it decides about 64-bit numbers.
	Blocks uint64
	// Durable makes a commit survive the loss of the host: the device is flushed.
	// Without it only the order of writes is kept, which a killed process survives.
	Durable bool
	// Interval is the age at which the running transaction is committed; 5 s when 0.
	Interval time.Duration
	// Now is the clock of commit blocks; time.Now when nil.
	Now func() time.Time
	// BeforeCommit finishes the running transaction: no handle but its own is open.
	// It may touch a few blocks that are not part of it yet.
	BeforeCommit func(*Handle) error
	// AfterCommit is called once the transaction is durable, before Commit returns.
	AfterCommit func(tid uint64)
	// OnAbort is called once, with the error after which nothing more is written. No lock of the journal is held.
	OnAbort func(error)
}

const (
	defaultInterval = 5 * time.Second
	hookCredits     = 4   // of BeforeCommit
	minLog          = 512 // blocks: in a quarter of less, an operation of ours might not fit (mke2fs makes 1024 at least)
)

// Block is a metadata block in memory. Whoever keeps it may change Data only
// between Handle.Get and Handle.End.
type Block struct {
	Number uint64
	Data   []byte

	item atomic.Pointer[item] // the newest transaction's that is not in place yet
}

// Busy tells whether the journal still needs the block in memory: what is in its
// place on the device is older.
func (b *Block) Busy() bool { return b.item.Load() != nil }

// item is a block in one transaction, until that version is in its place or a
// newer one is committed.
type item struct {
	b   *Block
	txn *transaction

	// Guarded by Journal.mu.
	frozen  []byte // the bytes to be logged, when the next transaction has changed them
	taken   bool   // the bytes to be logged have been copied
	dropped bool   // freed by the transaction that changed it
	at      uint32 // where it is in the log
	escaped bool
}

// transaction is running, then committing, then waiting to be checkpointed.
type transaction struct {
	tid      uint64
	switched chan struct{} // closed when it stops running
	ready    atomic.Bool   // the log has room for it
	promised atomic.Int64  // credits of open handles that they have not used
	blocks   atomic.Int64  // items that are not dropped, and revokes as blocks

	// Guarded by Journal.mu.
	items   []*item
	revoked []uint64
	timer   *time.Timer

	start, size uint32 // where it is in the log; set by commit
	live        int    // items that a checkpoint must still put in place; guarded by Journal.mu
}

// Journal is an open journal.
type Journal struct {
	log       *log
	cfg       Config
	maxBlocks int64  // most blocks and revoke blocks of one transaction
	maxSize   uint32 // the most it can take in the log

	commitMu sync.Mutex
	barrier  sync.RWMutex // see doc.go
	running  *transaction // replaced under barrier
	buf      []byte       // of the commit under way; guarded by commitMu
	active   bool         // the log is marked as not empty; guarded by commitMu

	cpMu sync.Mutex
	cpIO sync.Mutex

	mu         sync.Mutex
	committing *transaction
	committed  []*transaction   // those in the log, oldest first
	places     map[uint64]*item // newest committed version of each block that is not in place
	used       uint32           // blocks of the log that hold committed transactions
	head       uint32           // where the next transaction goes
	cleaning   bool             // a checkpoint runs in the background
	background sync.WaitGroup

	gathering atomic.Uint64 // tid of the running transaction
	durable   atomic.Uint64 // tid of the newest committed transaction
	failMu    sync.Mutex
	failure   error
	dead      atomic.Bool // failure is set

	stats stats
}

type stats struct{ commits, blocks, revokes, checkpoints, frozen, overruns atomic.Int64 }

// Stats counts what a journal has done since it was opened.
type Stats struct {
	Commits, Blocks, Revokes, Checkpoints int64
	// Frozen counts blocks copied because a transaction changed them while the one before was written.
	Frozen int64
	// Overruns counts handles that touched more blocks than they had announced.
	Overruns int64
}

// Open opens the journal that lies in runs, whose log must be empty (ErrNeedsRecovery). It writes nothing.
func Open(dev blockdev.Device, runs []Run, cfg Config) (*Journal, error) {
	l, err := openLog(dev, cfg.BlockSize, runs)
	if err != nil {
		return nil, err
	}
	if cfg.Interval <= 0 {
		cfg.Interval = defaultInterval
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	need := uint32(incompatRevoke)
	if cfg.Blocks > 1<<32 {
		need |= incompat64bit
	}
	if l.incompat()&need != need {
		l.addIncompat(need) // stored with the first transaction
	}
	j := &Journal{log: l, cfg: cfg, head: l.first, places: map[uint64]*item{}}
	j.maxSize = (l.last - l.first) / 4
	j.maxBlocks = int64(j.maxSize) - int64(j.maxSize)/int64(l.tagsPer+1) - hookCredits - 2
	tid := uint64(be.Uint32(l.raw[sSequence:]))
	if tid == 0 {
		tid = 1
	}
	tid += 1 << 32 // so that 0 is before every transaction; the log has the lower half
	j.durable.Store(tid - 1)
	j.running = newTransaction(tid)
	j.gathering.Store(tid)
	return j, nil
}

func newTransaction(tid uint64) *transaction {
	return &transaction{tid: tid, switched: make(chan struct{})}
}

// Stats gives the counters.
func (j *Journal) Stats() Stats {
	s := &j.stats
	return Stats{
		Commits: s.commits.Load(), Blocks: s.blocks.Load(), Revokes: s.revokes.Load(),
		Checkpoints: s.checkpoints.Load(), Frozen: s.frozen.Load(), Overruns: s.overruns.Load(),
	}
}

// MaxCredits is the largest number Begin takes.
func (j *Journal) MaxCredits() int { return int(j.maxBlocks / 2) }

// Handle is one operation. It belongs to one goroutine.
type Handle struct {
	j       *Journal
	t       *transaction
	credits int64 // announced and not used yet
}

// Begin opens a handle that will touch at most credits blocks (MaxCredits at most).
// It may wait for a commit or a checkpoint, so no lock that a handle takes may be
// held. Handles do not nest.
func (j *Journal) Begin(credits int) (*Handle, error) {
	n := int64(min(credits, j.MaxCredits()))
	for {
		if err := j.Err(); err != nil {
			return nil, err
		}
		j.barrier.RLock()
		t := j.running
		if t.ready.Load() && t.promised.Add(n)+t.blocks.Load() <= j.maxBlocks {
			return &Handle{j: j, t: t, credits: n}, nil
		}
		ready := t.ready.Load()
		if ready {
			t.promised.Add(-n)
		}
		j.barrier.RUnlock()
		if !ready {
			if err := j.makeRoom(t); err != nil {
				return nil, err
			}
			continue
		}
		done := make(chan struct{})
		j.background.Add(1)
		go func() {
			defer j.background.Done()
			defer close(done)
			j.Commit(t.tid) //nolint:errcheck // the journal remembers its errors
		}()
		select {
		case <-t.switched:
		case <-done: // handles had promised much and changed nothing, or the journal has failed
		}
	}
}

// Tid is the number of the transaction the handle's changes are in, for Commit.
func (h *Handle) Tid() uint64 { return h.t.tid }

// Room is the number of announced blocks that are left.
func (h *Handle) Room() int { return int(h.credits) }

// Get announces that Data of b is going to be changed by this handle.
func (h *Handle) Get(b *Block) {
	t := h.t
	if it := b.item.Load(); it != nil && it.txn == t {
		return
	}
	j := h.j
	j.mu.Lock()
	defer j.mu.Unlock()
	old := b.item.Load()
	if old != nil && old.txn == t {
		return
	}
	if old != nil && old.txn == j.committing && !old.taken {
		old.frozen = slices.Clone(b.Data)
		j.stats.frozen.Add(1)
	}
	it := &item{b: b, txn: t}
	t.items = append(t.items, it)
	b.item.Store(it)
	h.spend()
	j.arm(t)
}

// spend counts one block of the transaction. j.mu is held.
func (h *Handle) spend() {
	h.t.blocks.Add(1)
	if h.credits--; h.credits >= 0 {
		h.t.promised.Add(-1)
	} else {
		h.j.stats.overruns.Add(1)
	}
}

// arm starts the clock of a transaction that has just got something. j.mu is held.
func (j *Journal) arm(t *transaction) {
	if t.timer == nil {
		t.timer = time.AfterFunc(j.cfg.Interval, func() {
			j.Commit(t.tid) //nolint:errcheck // the journal remembers its errors
		})
	}
}

// Forget says that metadata block blk is free. b is the block in memory, nil when
// there is none; it is of no use afterwards. Until the transaction is committed
// nobody may use blk for anything.
func (h *Handle) Forget(blk uint64, b *Block) {
	j, t := h.j, h.t
	j.mu.Lock()
	defer j.mu.Unlock()
	if b != nil {
		if it := b.item.Load(); it != nil && it.txn == t && !it.dropped {
			it.dropped = true
			t.blocks.Add(-1)
		}
	}
	t.revoked = append(t.revoked, blk)
	if len(t.revoked)%j.log.revokesPer() == 1 {
		h.spend()
	}
	j.arm(t)
}

// End closes the handle: what it changed will be committed as a whole.
func (h *Handle) End() {
	if h.credits > 0 {
		h.t.promised.Add(-h.credits)
	}
	h.j.barrier.RUnlock()
}

// Running is the number of the transaction that is gathering.
func (j *Journal) Running() uint64 { return j.gathering.Load() }

// Committed tells whether transaction tid is durable.
func (j *Journal) Committed(tid uint64) bool { return j.durable.Load() >= tid }

// Err is what made the journal fail, nil while it works.
func (j *Journal) Err() error {
	if !j.dead.Load() {
		return nil
	}
	j.failMu.Lock()
	defer j.failMu.Unlock()
	return j.failure
}

// Abort gives the journal up: nothing more is written but, if that is possible,
// the error itself.
func (j *Journal) Abort(err error) {
	j.failMu.Lock()
	first := j.failure == nil
	if first {
		j.failure = fmt.Errorf("jbd2: the journal was given up: %w", err)
		j.dead.Store(true)
	}
	j.failMu.Unlock()
	if !first {
		return
	}
	errno := syscall.EIO
	errors.As(err, &errno)
	if errno == 0 || errno == syscall.EROFS {
		errno = syscall.EIO
	}
	j.log.writeErrno(-int32(errno)) //nolint:errcheck // it is the device that fails, most likely
	if j.cfg.OnAbort != nil {
		j.cfg.OnAbort(err)
	}
}

// Close commits, brings everything in place and leaves the log empty. No handle
// may be open or opened.
func (j *Journal) Close() error {
	if _, err := j.Commit(0); err != nil {
		return err
	}
	if err := j.checkpoint(0); err != nil {
		return err
	}
	j.background.Wait()
	j.commitMu.Lock()
	defer j.commitMu.Unlock()
	if err := j.Err(); err != nil {
		return err
	}
	if !j.active {
		return nil
	}
	// One number is left out, so that no block of a transaction that was cut off is ever taken for a new one.
	if err := j.log.writeSuper(0, uint32(j.running.tid+1), 0); err != nil {
		j.Abort(err)
		return err
	}
	j.active = false
	return j.flush()
}

// flush makes what was written so far durable, as far as that is asked for.
func (j *Journal) flush() error {
	if !j.cfg.Durable {
		return nil
	}
	if err := j.log.dev.Flush(); err != nil {
		err = fmt.Errorf("jbd2: %w", err)
		j.Abort(err)
		return err
	}
	return nil
}

// passed returns when whoever holds mu now has released it.
func passed(mu *sync.Mutex) {
	mu.Lock()
	defer mu.Unlock()
}

// errAbandoned is the failure of a journal that nobody uses any more.
var errAbandoned = errors.New("jbd2: the journal is closed")

// Abandon stops everything that runs in the background and waits for it. Nothing
// is written from then on. For after Close, or instead of it.
func (j *Journal) Abandon() {
	j.failMu.Lock()
	if j.failure == nil {
		j.failure = errAbandoned
		j.dead.Store(true)
	}
	j.failMu.Unlock()
	j.commitMu.Lock()
	passed(&j.cpMu)
	j.mu.Lock()
	if t := j.running.timer; t != nil {
		t.Stop()
	}
	j.mu.Unlock()
	j.commitMu.Unlock()
	j.background.Wait()
}
