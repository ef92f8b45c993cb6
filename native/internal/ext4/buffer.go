package ext4

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"gvx.dev/gvx/native/internal/blockdev"
	"gvx.dev/gvx/native/internal/jbd2"
)

// A buffer is one metadata block in memory. Its bytes are guarded by the lock of
// what they belong to (inode, allocator, …), not by the cache.
type buffer struct {
	blk   uint64
	data  []byte
	load  sync.Once
	err   error         // result of load
	kind  atomic.Uint32 // kind… the bytes were verified as; 0: not yet
	jb    jbd2.Block    // the buffer as the journal sees it; its Data are data
	held  atomic.Int32  // raised below bufferCache.mu: about to become the journal's
	dirty bool          // guarded by bufferCache.mu: without a journal, flush writes it
	pin   bool          // guarded by bufferCache.mu: stays for good
	used  bool          // guarded by bufferCache.mu: touched since the last eviction round
}

// Kinds of verified buffers.
const (
	kindNone = iota
	kindExtent
	kindDirLeaf
	kindDirIndex
	kindXattr
)

// bufferCache is the only way to metadata on the device. For any block there is
// at most one buffer that may be changed: the one write returns.
type bufferCache struct {
	dev       blockdev.Device
	blockSize int
	limit     int // buffers kept that are neither pinned nor differ from the device

	mu      sync.Mutex
	blocks  map[uint64]*buffer
	dirty   map[uint64]*buffer // those of blocks that are dirty
	evictAt int                // clean buffers that make the next eviction due
}

func newBufferCache(dev blockdev.Device, blockSize int, limit int64) *bufferCache {
	n := max(int(limit/int64(blockSize)), 16)
	return &bufferCache{dev: dev, blockSize: blockSize, limit: n, evictAt: n, blocks: map[uint64]*buffer{}, dirty: map[uint64]*buffer{}}
}

// get finds or makes the buffer of blk without loading it. c.mu is held.
func (c *bufferCache) get(blk uint64) *buffer {
	b := c.blocks[blk]
	if b == nil {
		if len(c.blocks)-len(c.dirty) > c.evictAt {
			c.evict()
			// Pinned buffers alone may exceed the limit: do not search in vain each time.
			c.evictAt = max(c.limit, len(c.blocks)-len(c.dirty)+c.limit/4)
		}
		b = &buffer{blk: blk}
		b.jb.Number = blk
		c.blocks[blk] = b
	}
	b.used = true
	return b
}

// evict drops clean buffers down to three quarters of the limit, those not used
// since the last round first. c.mu is held.
func (c *bufferCache) evict() {
	want := len(c.blocks) - len(c.dirty) - c.limit*3/4
	for round := 0; round < 2 && want > 0; round++ {
		for blk, b := range c.blocks {
			if b.dirty || b.pin || b.held.Load() != 0 || b.jb.Busy() {
				continue
			}
			if b.used && round == 0 {
				b.used = false
				continue
			}
			delete(c.blocks, blk)
			if want--; want <= 0 {
				break
			}
		}
	}
}

func (c *bufferCache) fill(b *buffer) error {
	b.load.Do(func() {
		b.data = make([]byte, c.blockSize)
		if _, err := c.dev.ReadAt(b.data, int64(b.blk)*int64(c.blockSize)); err != nil {
			b.err = fmt.Errorf("ext4: metadata block %d: %w", b.blk, err)
		}
		b.jb.Data = b.data
	})
	if b.err != nil {
		c.mu.Lock()
		if c.blocks[b.blk] == b && !b.dirty { // try again next time
			delete(c.blocks, b.blk)
		}
		c.mu.Unlock()
	}
	return b.err
}

// read gives the block for reading.
func (c *bufferCache) read(blk uint64) (*buffer, error) {
	c.mu.Lock()
	b := c.get(blk)
	c.mu.Unlock()
	return b, c.fill(b)
}

// readPinned is read of a block that stays for good.
func (c *bufferCache) readPinned(blk uint64) (*buffer, error) {
	c.mu.Lock()
	b := c.get(blk)
	b.pin = true
	c.mu.Unlock()
	return b, c.fill(b)
}

// hold is read of a block that is about to become the journal's: until the caller
// lowers held it stays in the cache.
func (c *bufferCache) hold(blk uint64) (*buffer, error) {
	c.mu.Lock()
	b := c.get(blk)
	b.held.Add(1)
	c.mu.Unlock()
	return b, c.fill(b)
}

// write gives the block for changing, without a journal: it is dirty from now on. Only handles call it.
func (c *bufferCache) write(blk uint64) (*buffer, error) {
	c.mu.Lock()
	b := c.get(blk)
	b.dirty = true
	c.dirty[blk] = b
	c.mu.Unlock()
	err := c.fill(b)
	if err != nil {
		c.forget(blk)
	}
	return b, err
}

// create gives a zeroed block for filling, without reading what was there.
func (c *bufferCache) create(blk uint64) *buffer {
	return c.put(blk, make([]byte, c.blockSize), bufDirty)
}

// What put makes of a block, apart from its contents.
const (
	bufDirty  = iota
	bufHeld   // as after hold
	bufPinned // it differs from the device and nobody needs to know yet
)

// put makes data the contents of a block.
func (c *bufferCache) put(blk uint64, data []byte, as int) *buffer {
	b := &buffer{blk: blk, data: data, used: true, dirty: as == bufDirty, pin: as == bufPinned}
	b.jb.Number, b.jb.Data = blk, data
	if as == bufHeld {
		b.held.Store(1)
	}
	b.load.Do(func() {})
	c.mu.Lock()
	c.blocks[blk] = b
	if b.dirty {
		c.dirty[blk] = b
	}
	c.mu.Unlock()
	return b
}

// forget drops a freed block so that it never overwrites what comes after it,
// and gives the buffer it had, if any.
func (c *bufferCache) forget(blk uint64) *buffer {
	c.mu.Lock()
	defer c.mu.Unlock()
	b := c.blocks[blk]
	delete(c.blocks, blk)
	delete(c.dirty, blk)
	return b
}

// dirtyBytes is the amount of memory that only flush can free.
func (c *bufferCache) dirtyBytes() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return int64(len(c.dirty)) * int64(c.blockSize)
}

// flush writes every dirty buffer, neighbours together. Nobody may be changing
// buffers meanwhile (FS.barrier is held exclusively).
func (c *bufferCache) flush() error {
	c.mu.Lock()
	todo := make([]*buffer, 0, len(c.dirty))
	for _, b := range c.dirty {
		todo = append(todo, b)
	}
	c.mu.Unlock()
	slices.SortFunc(todo, func(a, b *buffer) int {
		if a.blk < b.blk {
			return -1
		}
		return 1
	})
	const maxRun = 256
	var run []byte
	for len(todo) > 0 {
		n := 1
		for n < len(todo) && n < maxRun && todo[n].blk == todo[0].blk+uint64(n) {
			n++
		}
		data := todo[0].data
		if n > 1 {
			run = run[:0]
			for _, b := range todo[:n] {
				run = append(run, b.data...)
			}
			data = run
		}
		if _, err := c.dev.WriteAt(data, int64(todo[0].blk)*int64(c.blockSize)); err != nil {
			return fmt.Errorf("ext4: metadata block %d: %w", todo[0].blk, err)
		}
		c.mu.Lock()
		for _, b := range todo[:n] {
			b.dirty = false
			delete(c.dirty, b.blk)
		}
		c.mu.Unlock()
		todo = todo[n:]
	}
	return nil
}
