package jbd2

import (
	"bytes"
	"fmt"
	"maps"
	"sync"
	"syscall"
	"testing"
	"time"
)

// memory is a Device that remembers what was done to it and does what a test wants it to.
type memory struct {
	mu      sync.Mutex
	data    []byte
	events  []event
	loose   []event                   // not flushed
	fail    error                     // what every write and flush gives
	onWrite func(off int64, p []byte) // called before a write, without mu
	onFlush func()                    // called before a flush, without mu
	stable  []byte                    // what was flushed
}

// event is a write (its offset and length) or a flush (length 0).
type event struct {
	off int64
	n   int
}

func newMemory(size int) *memory {
	return &memory{data: make([]byte, size), stable: make([]byte, size)}
}

func (m *memory) ReadAt(p []byte, off int64) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return copy(p, m.data[off:]), nil
}

func (m *memory) WriteAt(p []byte, off int64) (int, error) {
	if m.onWrite != nil {
		m.onWrite(off, p)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return 0, m.fail
	}
	m.events = append(m.events, event{off, len(p)})
	m.loose = append(m.loose, event{off, len(p)})
	return copy(m.data[off:], p), nil
}

func (m *memory) Size() int64 { return int64(len(m.data)) }

func (m *memory) Flush() error {
	if m.onFlush != nil {
		m.onFlush()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return m.fail
	}
	m.events = append(m.events, event{})
	for _, e := range m.loose {
		copy(m.stable[e.off:e.off+int64(e.n)], m.data[e.off:])
	}
	m.loose = nil
	return nil
}

func (m *memory) Discard(off, n int64) error { return syscall.EOPNOTSUPP }
func (m *memory) FD() int                    { return -1 }

// image is a copy of what is on the device.
func (m *memory) image() []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return bytes.Clone(m.data)
}

func (m *memory) setFail(err error) {
	m.mu.Lock()
	m.fail = err
	m.mu.Unlock()
}

const (
	testBlock  = 1024
	testVolume = 1400 // blocks of the device
)

// testRuns is where the log lies: in three pieces out of order.
var testRuns = []Run{{900, 100}, {600, 300}, {1000, 400}}

// format writes a journal superblock: version 3 or 4 with the given features.
func format(m *memory, kind, incompat uint32) {
	raw := make([]byte, testBlock)
	putHeader(raw, kind, 0)
	be.PutUint32(raw[sBlockSize:], testBlock)
	be.PutUint32(raw[sMaxLen:], 800)
	be.PutUint32(raw[sFirst:], 1)
	be.PutUint32(raw[sSequence:], 1<<32-40) // goes round soon
	if kind == kindSuperV2 {
		be.PutUint32(raw[sIncompat:], incompat)
		copy(raw[sUUID:], "0123456789abcdef")
		raw[sChecksumType] = csumCRC32C
		if incompat&incompatFast != 0 {
			be.PutUint32(raw[sNumFCBlocks:], 200)
		}
		be.PutUint32(raw[sChecksum:], sumAround(^uint32(0), raw, sChecksum))
	} else {
		copy(raw[superV1Size:], bytes.Repeat([]byte{0xa5}, testBlock-superV1Size))
	}
	copy(m.data[int(testRuns[0].Start)*testBlock:], raw)
}

func openTest(t *testing.T, m *memory, cfg Config) *Journal {
	t.Helper()
	cfg.BlockSize, cfg.Blocks = testBlock, testVolume
	if cfg.Interval == 0 {
		cfg.Interval = time.Hour
	}
	j, err := Open(m, testRuns, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(j.Abandon)
	return j
}

func begin(t *testing.T, j *Journal, credits int) *Handle {
	t.Helper()
	h, err := j.Begin(credits)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func commit(t *testing.T, j *Journal) {
	t.Helper()
	if _, err := j.Commit(0); err != nil {
		t.Fatal(err)
	}
}

// block makes a Block as a cache would read it.
func block(m *memory, n uint64) *Block {
	b := &Block{Number: n, Data: make([]byte, testBlock)}
	m.ReadAt(b.Data, int64(n)*testBlock) //nolint:errcheck // never fails
	return b
}

// replay reads the log of an image as the format says, strictly, and gives the blocks it brings. It is a
// judge for tests of this package; volumes are recovered by ext4lite.
func replay(img []byte) (map[uint64][]byte, error) {
	at := func(n uint32) []byte {
		for _, r := range testRuns {
			if n < r.Count {
				return img[(int(r.Start)+int(n))*testBlock:][:testBlock]
			}
			n -= r.Count
		}
		return nil
	}
	sb := at(0)
	var f uint32
	if be.Uint32(sb[sBlockType:]) == kindSuperV2 {
		f = be.Uint32(sb[sIncompat:])
	}
	uuid := make([]byte, 16)
	if be.Uint32(sb[sBlockType:]) == kindSuperV2 {
		copy(uuid, sb[sUUID:])
	}
	sums := f&(incompatCsumV2|incompatCsumV3) != 0
	if sums && sumAround(^uint32(0), sb, sChecksum) != be.Uint32(sb[sChecksum:]) {
		return nil, fmt.Errorf("checksum of the superblock")
	}
	first, last := be.Uint32(sb[sFirst:]), be.Uint32(sb[sMaxLen:])
	if f&incompatFast != 0 {
		last -= be.Uint32(sb[sNumFCBlocks:])
	}
	next := func(n uint32) uint32 {
		if n++; n == last {
			return first
		}
		return n
	}
	seed := crc32c(^uint32(0), uuid)
	end := testBlock
	if sums {
		end -= 4
	}
	type logged struct {
		blk  uint64
		data []byte
		seq  uint32
	}
	var all, mine []logged
	revoked, myRevokes := map[uint64]uint32{}, map[uint64]uint32{}
	seq := be.Uint32(sb[sSequence:])
	pos := be.Uint32(sb[sStart:])
	if pos == 0 {
		return nil, nil
	}
	for {
		p := at(pos)
		if be.Uint32(p) != magic || be.Uint32(p[8:]) != seq {
			break
		}
		pos = next(pos)
		switch kind := be.Uint32(p[4:]); kind {
		case kindDescriptor:
			if sums && sumAround(seed, p, end) != be.Uint32(p[end:]) {
				return nil, fmt.Errorf("descriptor of %d: checksum", seq)
			}
			for o := headerSize; ; {
				blk, flags, size := uint64(be.Uint32(p[o:])), uint32(0), 8
				var sum, have uint32
				data := at(pos)
				var s [4]byte
				be.PutUint32(s[:], seq)
				have = crc32c(crc32c(seed, s[:]), data)
				if f&incompatCsumV3 != 0 {
					flags, sum, size = be.Uint32(p[o+4:]), be.Uint32(p[o+12:]), 16
					blk |= uint64(be.Uint32(p[o+8:])) << 32
				} else {
					sum, flags = uint32(be.Uint16(p[o+4:])), uint32(be.Uint16(p[o+6:]))
					have &= 0xffff
					if f&incompat64bit != 0 {
						size += 4
						blk |= uint64(be.Uint32(p[o+8:])) << 32
					}
					if f&incompatCsumV2 != 0 {
						size += 2
					}
				}
				if sums && sum != have {
					return nil, fmt.Errorf("block %d in %d: checksum", blk, seq)
				}
				if o += size; flags&flagSameUUID == 0 {
					if !bytes.Equal(p[o:o+16], uuid) {
						return nil, fmt.Errorf("descriptor of %d: UUID", seq)
					}
					o += 16
				}
				if flags&flagEscape != 0 {
					data = bytes.Clone(data)
					be.PutUint32(data, magic)
				} else if be.Uint32(data) == magic {
					return nil, fmt.Errorf("block %d in %d is not escaped", blk, seq)
				}
				mine = append(mine, logged{blk, data, seq})
				pos = next(pos)
				if flags&flagLast != 0 {
					break
				}
			}
		case kindRevoke:
			if sums && sumAround(seed, p, end) != be.Uint32(p[end:]) {
				return nil, fmt.Errorf("revokes of %d: checksum", seq)
			}
			if f&incompatRevoke == 0 {
				return nil, fmt.Errorf("revokes without the feature")
			}
			n := int(be.Uint32(p[12:]))
			for o := revokeHeader; o < n; {
				if f&incompat64bit != 0 {
					myRevokes[be.Uint64(p[o:])] = seq
					o += 8
				} else {
					myRevokes[uint64(be.Uint32(p[o:]))] = seq
					o += 4
				}
			}
		case kindCommit:
			if sums && sumAround(seed, p, cChecksum) != be.Uint32(p[cChecksum:]) {
				return nil, fmt.Errorf("commit of %d: checksum", seq)
			}
			all = append(all, mine...)
			maps.Copy(revoked, myRevokes)
			mine, myRevokes = nil, map[uint64]uint32{}
			seq++
		default:
			return nil, fmt.Errorf("block of kind %d", kind)
		}
	}
	out := map[uint64][]byte{}
	for _, l := range all {
		if by, ok := revoked[l.blk]; ok && int32(l.seq-by) <= 0 {
			continue
		}
		out[l.blk] = l.data
	}
	return out, nil
}

// recovered is the image with its log replayed.
func recovered(t *testing.T, img []byte) []byte {
	t.Helper()
	blocks, err := replay(img)
	if err != nil {
		t.Fatal(err)
	}
	for n, p := range blocks {
		copy(img[n*testBlock:], p)
	}
	return img
}
