package blockdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// Layered is a Device whose blocks may lie in another file.
type Layered interface {
	Device
	// BaseFD is a descriptor of the file that absent blocks are read from, at the same
	// offsets; BaseSize its length, behind which they are zeros.
	BaseFD() int
	BaseSize() int64
	// Present tells whether the byte at off is the device's own file's, and for how many
	// bytes, up to n, that holds. What is present stays so.
	Present(off, n int64) (bool, int64)
	// CopyUp makes the blocks of [off, off+n) present, contents as they are.
	CopyUp(off, n int64) error
	// WriteWith is WriteAt for whoever writes to FD himself: write stores all n bytes at
	// off, or fails. It tells whether blocks were absent.
	WriteWith(off, n int64, write func() error) (bool, error)
}

// Delta is a Device of what differs from a backing file.
type Delta struct {
	disk   disk // the whole delta file; data lies at its own addresses
	base   file
	fd     int // of disk
	size   int64
	id     [16]byte
	bitmap int64 // where the bitmap begins in the file

	readOnly, eager bool

	pages []atomic.Pointer[deltaPage]

	// first holds back those who write to absent blocks, so that no two bring the
	// same block's rest along. A write takes the locks of its stripes in order, and
	// then mu.
	first [stripes]sync.Mutex

	// flushing makes flushes queue. It is taken before mu.
	flushing sync.Mutex

	// mu guards the making of pages, all that is in them but the bits, and failed.
	mu     sync.Mutex
	failed error
}

// disk is the host file of a delta: a file, or in tests one that can lose and tear what was not flushed.
type disk interface {
	ReadAt(p []byte, off int64) (int, error)
	WriteAt(p []byte, off int64) (int, error)
	Flush() error
	Discard(off, n int64) error
}

const (
	stripes     = 64
	stripeShift = 8 // blocks a stripe: 1 MiB
)

// deltaPage is a page of the bitmap.
type deltaPage struct {
	// bits are only ever set, and only when the block's bytes are in the file (and
	// with eager also the bit). Read and set by atomic operations.
	bits [pageWords]atomic.Uint64

	number   uint32
	slot     int64  // the place that has the current state, if sequence is not 0
	sequence uint64 // of that state
	unsynced bool   // written since the last fdatasync: the other place may be the only durable one
	dirty    bool   // the file lacks bits
	raw      [DeltaBlock]byte
}

// DeltaOptions are options of NewDelta.
type DeltaOptions struct {
	ReadOnly bool
	// Eager puts the bitmap into the file with every write, so that what was written
	// outlives this process without a Flush. Without it only Flush does.
	Eager bool
}

// IsDelta tells whether fd is a delta file.
func IsDelta(fd int) (bool, error) {
	h, err := readDeltaHeader(fd)
	return h != nil, err
}

// NewDelta makes a Device of a delta file and its backing file, which are checked. The
// descriptors stay the caller's.
func NewDelta(fd, base int, o DeltaOptions) (*Delta, error) {
	h, err := readDeltaHeader(fd)
	if err != nil {
		return nil, err
	}
	if h == nil {
		return nil, fmt.Errorf("blockdev: not a delta file: %w", ErrDelta)
	}
	if err := h.checkBase(base); err != nil {
		return nil, err
	}
	whole := &file{fd: fd, readOnly: o.ReadOnly, size: deltaFileSize(h.size)}
	return newDelta(whole, fd, file{fd: base, readOnly: true, size: h.baseSize}, h, o)
}

func newDelta(whole disk, fd int, base file, h *deltaHeader, o DeltaOptions) (*Delta, error) {
	d := &Delta{
		disk:     whole,
		base:     base,
		fd:       fd,
		size:     h.size,
		id:       h.id,
		bitmap:   alignUp(h.size),
		readOnly: o.ReadOnly,
		eager:    o.Eager,
		pages:    make([]atomic.Pointer[deltaPage], deltaPages(h.size)),
	}
	if err := d.load(); err != nil {
		return nil, err
	}
	return d, nil
}

// check tells whether [off, off+n) lies within the device.
func (d *Delta) check(what string, off, n int64) error {
	if !(&file{size: d.size}).inside(off, n) {
		return fmt.Errorf("blockdev: %s of %d bytes at %d is outside the device of %d: %w", what, n, off, d.size, syscall.EIO)
	}
	return nil
}

// checkWrite is check for what changes the device.
func (d *Delta) checkWrite(what string, off, n int64) error {
	if d.readOnly {
		return syscall.EROFS
	}
	return d.check(what, off, n)
}

// load reads the pages of the bitmap that were ever written.
func (d *Delta) load() error {
	end := d.bitmap + int64(len(d.pages))*pagePair
	next := int64(0) // page
	raw := make([]byte, pagePair)
	for at := d.bitmap; at < end; {
		data, err := unix.Seek(d.fd, at, unix.SEEK_DATA)
		switch {
		case errors.Is(err, syscall.ENXIO):
			return nil
		case errors.Is(err, syscall.EINVAL):
			data = at // the host cannot tell
		case err != nil:
			return fmt.Errorf("blockdev: seek: %w", err)
		}
		n := max(next, (data-d.bitmap)/pagePair)
		if n >= int64(len(d.pages)) {
			return nil
		}
		if _, err := d.disk.ReadAt(raw, d.bitmap+n*pagePair); err != nil {
			return err
		}
		p, err := d.parsePage(raw, n)
		if err != nil {
			return err
		}
		if p != nil {
			d.pages[n].Store(p)
		}
		next = n + 1
		at = d.bitmap + next*pagePair
	}
	return nil
}

// parsePage makes a page of its two places; nil if it was never written.
func (d *Delta) parsePage(raw []byte, n int64) (*deltaPage, error) {
	var zero [DeltaBlock]byte
	var best []byte
	damaged, slot := 0, int64(0)
	le := binary.LittleEndian
	for i := range int64(2) {
		p := raw[i*DeltaBlock : (i+1)*DeltaBlock]
		switch {
		case string(p) == string(zero[:]):
		case le.Uint32(p) != sumAt(p, 0) || int64(le.Uint32(p[4:])) != n || [16]byte(p[16:]) != d.id:
			damaged++
		case best == nil || le.Uint64(p[8:]) > le.Uint64(best[8:]):
			best, slot = p, i
		}
	}
	if damaged == 2 {
		return nil, fmt.Errorf("blockdev: both places of page %d of the bitmap are damaged: %w", n, ErrDelta)
	}
	if best == nil {
		// Never written; if one place is damaged, that very first write was torn, and nothing was promised yet.
		return nil, nil
	}
	p := &deltaPage{number: uint32(n), slot: slot, sequence: le.Uint64(best[8:]), unsynced: d.eager}
	copy(p.raw[:], best)
	for i := range p.bits {
		p.bits[i].Store(le.Uint64(best[pageHead+8*i:]))
	}
	count := min(pageBits, alignUp(d.size)/DeltaBlock-n*pageBits)
	if run, _ := p.run(count, pageBits-count, false); run != pageBits-count {
		return nil, fmt.Errorf("blockdev: page %d of the bitmap has blocks outside the volume: %w", n, ErrDelta)
	}
	return p, nil
}

// run tells for how many bits, from bit on and at most n, the bits are as want says, or
// as the first one is where that differs.
func (p *deltaPage) run(bit, n int64, want bool) (int64, bool) {
	if n <= 0 {
		return 0, want
	}
	invert := uint64(0)
	if want = p.bits[bit/64].Load()>>(bit%64)&1 == 1; want {
		invert = ^uint64(0)
	}
	end := bit + n
	for at := bit; at < end; at = (at/64 + 1) * 64 {
		word := (p.bits[at/64].Load() ^ invert) >> (at % 64)
		if word != 0 {
			return min(end, at+int64(bits.TrailingZeros64(word))) - bit, want
		}
	}
	return n, want
}

// runOf is run for blocks of the device; it does not go beyond a page.
func (d *Delta) runOf(block, n int64) (int64, bool) {
	number, bit := block/pageBits, block%pageBits
	n = min(n, pageBits-bit)
	p := d.pages[number].Load()
	if p == nil {
		return n, false
	}
	return p.run(bit, n, false)
}

// Size implements Device.Size.
func (d *Delta) Size() int64 { return d.size }

// FD implements Device.FD: it holds the bytes of what is present.
func (d *Delta) FD() int { return d.fd }

// BaseFD implements Layered.BaseFD.
func (d *Delta) BaseFD() int { return d.base.fd }

// BaseSize implements Layered.BaseSize.
func (d *Delta) BaseSize() int64 { return d.base.size }

// Present implements Layered.Present.
func (d *Delta) Present(off, n int64) (bool, int64) {
	first, end := off/DeltaBlock, (off+n+DeltaBlock-1)/DeltaBlock
	at := first
	var present bool
	for at < end {
		run, is := d.runOf(at, end-at)
		if at > first && is != present {
			break
		}
		present, at = is, at+run
	}
	return present, min(n, at*DeltaBlock-off)
}

// ReadAt implements Device.ReadAt.
func (d *Delta) ReadAt(p []byte, off int64) (int, error) {
	if err := d.check("read", off, int64(len(p))); err != nil {
		return 0, err
	}
	done := 0
	for done < len(p) {
		at := off + int64(done)
		present, n := d.Present(at, int64(len(p)-done))
		piece := p[done : done+int(n)]
		var err error
		if present {
			_, err = d.disk.ReadAt(piece, at)
		} else {
			err = d.readBase(piece, at)
		}
		if err != nil {
			return done, err
		}
		done += int(n)
	}
	return done, nil
}

// readBase reads the backing file, behind whose end there are zeros.
func (d *Delta) readBase(p []byte, off int64) error {
	n := max(0, min(int64(len(p)), d.base.size-off))
	if n > 0 {
		if _, err := d.base.ReadAt(p[:n], off); err != nil {
			return fmt.Errorf("the backing file: %w", err)
		}
	}
	clear(p[n:])
	return nil
}

// lockStripes locks out others who write to absent blocks of a range, and returns what
// unlocks.
func (d *Delta) lockStripes(block, end int64) func() {
	first, last := block>>stripeShift, (end-1)>>stripeShift
	var locked [stripes]bool
	for s := first; s <= min(last, first+stripes-1); s++ {
		locked[s%stripes] = true
	}
	for i, is := range locked {
		if is {
			d.first[i].Lock()
		}
	}
	return func() {
		for i, is := range locked {
			if is {
				d.first[i].Unlock()
			}
		}
	}
}

// WriteAt implements Device.WriteAt.
func (d *Delta) WriteAt(p []byte, off int64) (int, error) {
	n := int64(len(p))
	if err := d.checkWrite("write", off, n); err != nil || n == 0 {
		return 0, err
	}
	if present, run := d.Present(off, n); present && run == n {
		return d.disk.WriteAt(p, off)
	}
	block, end := off/DeltaBlock, (off+n+DeltaBlock-1)/DeltaBlock
	defer d.lockStripes(block, end)()
	if err := d.writeFirst(p, off); err != nil {
		return 0, err
	}
	return len(p), d.mark(block, end)
}

// WriteWith implements Layered.WriteWith.
func (d *Delta) WriteWith(off, n int64, write func() error) (bool, error) {
	if err := d.checkWrite("write", off, n); err != nil || n == 0 {
		return false, err
	}
	if present, run := d.Present(off, n); present && run == n {
		return false, write()
	}
	block, end := off/DeltaBlock, (off+n+DeltaBlock-1)/DeltaBlock
	defer d.lockStripes(block, end)()
	// What the first and the last block hold beside the n bytes comes along, as in writeFirst.
	if off%DeltaBlock != 0 || n < DeltaBlock {
		if err := d.copyUp(block, block+1); err != nil {
			return true, err
		}
	}
	if tail := off + n; tail%DeltaBlock != 0 && tail != d.size {
		if err := d.copyUp(end-1, end); err != nil {
			return true, err
		}
	}
	if err := write(); err != nil {
		return true, err
	}
	return true, d.mark(block, end)
}

// writeFirst writes where blocks may be absent: what the first and the last hold beside p
// comes along from below.
func (d *Delta) writeFirst(p []byte, off int64) error {
	for len(p) > 0 {
		n := int64(len(p))
		if in := off % DeltaBlock; in != 0 || n < DeltaBlock {
			n = min(n, DeltaBlock-in)
			if err := d.writePart(p[:n], off); err != nil {
				return err
			}
		} else {
			n -= n % DeltaBlock
			if _, err := d.disk.WriteAt(p[:n], off); err != nil {
				return err
			}
		}
		p, off = p[n:], off+n
	}
	return nil
}

// writePart writes p, which lies within one block.
func (d *Delta) writePart(p []byte, off int64) error {
	start := off - off%DeltaBlock
	if _, present := d.runOf(start/DeltaBlock, 1); present {
		_, err := d.disk.WriteAt(p, off)
		return err
	}
	whole := make([]byte, min(DeltaBlock, d.size-start))
	if err := d.readBase(whole, start); err != nil {
		return err
	}
	copy(whole[off-start:], p)
	_, err := d.disk.WriteAt(whole, start)
	return err
}

// CopyUp implements Layered.CopyUp.
func (d *Delta) CopyUp(off, n int64) error {
	if err := d.checkWrite("copy-up", off, n); err != nil {
		return err
	}
	block, end := off/DeltaBlock, (off+n+DeltaBlock-1)/DeltaBlock
	defer d.lockStripes(block, end)()
	return d.copyUp(block, end)
}

// copyUp is CopyUp for whole blocks. Their stripes are locked.
func (d *Delta) copyUp(block, end int64) error {
	for at := block; at < end; {
		run, present := d.runOf(at, min(end-at, 256))
		if !present {
			p := make([]byte, min(run*DeltaBlock, d.size-at*DeltaBlock))
			if err := d.readBase(p, at*DeltaBlock); err != nil {
				return err
			}
			if _, err := d.disk.WriteAt(p, at*DeltaBlock); err != nil {
				return err
			}
			if err := d.mark(at, at+run); err != nil {
				return err
			}
		}
		at += run
	}
	return nil
}

// mark notes blocks as present, whose bytes are in the file.
func (d *Delta) mark(block, end int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failed != nil {
		return d.failed
	}
	for block < end {
		number, bit := block/pageBits, block%pageBits
		stop := min(pageBits, bit+end-block)
		p := d.pages[number].Load()
		if p == nil {
			p = &deltaPage{number: uint32(number), slot: 1}
			d.pages[number].Store(p)
		}
		if run, present := p.run(bit, stop-bit, false); !present || run != stop-bit {
			if err := d.set(p, bit, stop); err != nil {
				return err
			}
		}
		block += stop - bit
	}
	return nil
}

// set sets bits of a page. With eager they are in the file before anybody sees them. mu is held.
func (d *Delta) set(p *deltaPage, bit, stop int64) error {
	masks := func(yield func(int64, uint64)) {
		for at := bit; at < stop; at = (at/64 + 1) * 64 {
			mask := ^uint64(0) << (at % 64)
			if end := (at/64 + 1) * 64; end > stop {
				mask &= ^uint64(0) >> (end - stop)
			}
			yield(at/64, mask)
		}
	}
	if d.eager {
		masks(func(i int64, mask uint64) {
			word := p.raw[pageHead+8*i:]
			binary.LittleEndian.PutUint64(word, binary.LittleEndian.Uint64(word)|mask)
		})
		if err := d.writePage(p); err != nil {
			return err
		}
	}
	masks(func(i int64, mask uint64) { p.bits[i].Or(mask) })
	p.dirty = !d.eager
	return nil
}

// writePage writes p.raw to the place that does not have the page's durable state. mu or, without eager, flushing is held.
func (d *Delta) writePage(p *deltaPage) error {
	slot := p.slot
	if !p.unsynced || p.sequence == 0 {
		slot = 1 - slot
	}
	le := binary.LittleEndian
	le.PutUint32(p.raw[4:], p.number)
	le.PutUint64(p.raw[8:], p.sequence+1)
	copy(p.raw[16:], d.id[:])
	le.PutUint32(p.raw[0:], sumAt(p.raw[:], 0))
	if _, err := d.disk.WriteAt(p.raw[:], d.bitmap+int64(p.number)*pagePair+slot*DeltaBlock); err != nil {
		return err
	}
	p.slot, p.sequence, p.unsynced = slot, p.sequence+1, true
	return nil
}

// Flush implements Device.Flush: the bytes become durable, then the bitmap. Once that has
// failed it fails for ever: nobody knows then what the host has lost.
func (d *Delta) Flush() error {
	if d.readOnly {
		return nil
	}
	d.flushing.Lock()
	defer d.flushing.Unlock()
	dirty, err := d.snapshot()
	if err == nil && d.eager {
		err = d.flushEager()
	} else if err == nil {
		err = d.flushLazy(dirty)
	}
	if err != nil {
		d.mu.Lock()
		d.failed = err
		d.mu.Unlock()
	}
	return err
}

// snapshot brings the bits of dirty pages into raw: a bit set later may be of bytes that the coming fdatasync misses.
func (d *Delta) snapshot() ([]*deltaPage, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var dirty []*deltaPage
	for i := range d.pages {
		p := d.pages[i].Load()
		if p == nil || !p.dirty {
			continue
		}
		for w := range p.bits {
			binary.LittleEndian.PutUint64(p.raw[pageHead+8*w:], p.bits[w].Load())
		}
		p.dirty = false
		dirty = append(dirty, p)
	}
	return dirty, d.failed
}

func (d *Delta) flushLazy(dirty []*deltaPage) error {
	if err := d.disk.Flush(); err != nil || len(dirty) == 0 {
		return err
	}
	for _, p := range dirty {
		if err := d.writePage(p); err != nil {
			return err
		}
	}
	if err := d.disk.Flush(); err != nil {
		return err
	}
	for _, p := range dirty {
		p.unsynced = false
	}
	return nil
}

// flushEager keeps others from writing pages meanwhile: what becomes durable now must not be overwritten.
func (d *Delta) flushEager() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.disk.Flush(); err != nil {
		return err
	}
	for i := range d.pages {
		if p := d.pages[i].Load(); p != nil {
			p.unsynced = false
		}
	}
	return nil
}

// Discard implements Device.Discard. Whole blocks become holes that are present, edges zeros.
func (d *Delta) Discard(off, n int64) error {
	if err := d.checkWrite("discard", off, n); err != nil || n == 0 {
		return err
	}
	block, end := (off+DeltaBlock-1)/DeltaBlock, (off+n)/DeltaBlock
	if off+n == d.size {
		end = alignUp(d.size) / DeltaBlock
	}
	if block >= end {
		_, err := d.WriteAt(make([]byte, n), off)
		return err
	}
	if err := d.discardBlocks(block, end); err != nil {
		return err
	}
	if head := block*DeltaBlock - off; head > 0 {
		if _, err := d.WriteAt(make([]byte, head), off); err != nil {
			return err
		}
	}
	if tail := off + n - end*DeltaBlock; tail > 0 {
		if _, err := d.WriteAt(make([]byte, tail), end*DeltaBlock); err != nil {
			return err
		}
	}
	return nil
}

func (d *Delta) discardBlocks(block, end int64) error {
	defer d.lockStripes(block, end)()
	if err := d.disk.Discard(block*DeltaBlock, (end-block)*DeltaBlock); err != nil {
		return err
	}
	return d.mark(block, end)
}

var _ Layered = (*Delta)(nil)

var _ io.ReaderAt = (*Delta)(nil)
