package jbd2

import (
	"errors"
	"fmt"
	"sort"
	"sync"
	"syscall"

	"gvx.dev/gvx/native/internal/blockdev"
)

// Run is a contiguous piece of the log's blocks on the device.
type Run struct {
	Start uint64
	Count uint32
}

// log is where the journal lies and what its superblock says. Blocks of it are
// numbered from 0, the superblock; transactions take first up to last, round and
// round.
type log struct {
	dev       blockdev.Device
	blockSize int
	runs      []Run
	starts    []uint32 // number of each run's first block

	first, last uint32

	// What follows from the features; never changes after activate.
	csum    int // version of the checksums, 0 for none
	wide    bool
	seed    uint32
	tail    int // bytes of a checksum at the end of descriptor and revoke blocks
	tagSize int
	tagsPer int // tags put into one descriptor block
	uuid    []byte

	sbMu sync.Mutex
	raw  []byte // the superblock's block; guarded by sbMu
}

// damaged is the error of a journal that cannot be right.
func damaged(format string, args ...any) error {
	return fmt.Errorf("jbd2: damaged journal: %s: %w", fmt.Sprintf(format, args...), syscall.EUCLEAN)
}

// ErrNeedsRecovery is the error of opening a log that holds transactions.
var ErrNeedsRecovery = errors.New("the journal needs recovery")

// maxPiece bounds what is gathered for one write to the device.
const maxPiece = 1 << 20

// openLog reads and checks the superblock of a journal; its log must be empty.
func openLog(dev blockdev.Device, blockSize int, runs []Run) (*log, error) {
	l := &log{dev: dev, blockSize: blockSize, runs: runs}
	blocks := uint64(0)
	for _, r := range runs {
		l.starts = append(l.starts, uint32(blocks))
		blocks += uint64(r.Count)
		if end := r.Start + uint64(r.Count); end < r.Start || end > uint64(dev.Size())/uint64(blockSize) || blocks > 1<<31 {
			return nil, damaged("blocks %d+%d are outside the device", r.Start, r.Count)
		}
	}
	if blocks == 0 {
		return nil, damaged("it has no blocks")
	}
	l.raw = make([]byte, blockSize)
	if _, err := dev.ReadAt(l.raw, l.offset(0)); err != nil {
		return nil, fmt.Errorf("jbd2: journal superblock: %w", err)
	}
	raw := l.raw
	kind := be.Uint32(raw[sBlockType:])
	if be.Uint32(raw) != magic || kind != kindSuperV1 && kind != kindSuperV2 {
		return nil, damaged("its superblock has magic %#x, type %d", be.Uint32(raw), kind)
	}
	if n := be.Uint32(raw[sBlockSize:]); int(n) != blockSize {
		return nil, damaged("it has blocks of %d bytes", n)
	}
	if kind == kindSuperV2 {
		if bad := be.Uint32(raw[sIncompat:]) &^ incompatKnown; bad != 0 || be.Uint32(raw[sRoCompat:]) != 0 {
			return nil, fmt.Errorf("jbd2: the journal uses unknown features %#x, %#x: %w", bad, be.Uint32(raw[sRoCompat:]), syscall.EOPNOTSUPP)
		}
		if l.incompat()&(incompatCsumV2|incompatCsumV3) != 0 {
			if raw[sChecksumType] != csumCRC32C {
				return nil, fmt.Errorf("jbd2: the journal has checksums of type %d: %w", raw[sChecksumType], syscall.EOPNOTSUPP)
			}
			if sumAround(^uint32(0), raw[:superSize], sChecksum) != be.Uint32(raw[sChecksum:]) {
				return nil, damaged("its superblock has a wrong checksum")
			}
		}
	}
	maxLen := be.Uint32(raw[sMaxLen:])
	l.first, l.last = be.Uint32(raw[sFirst:]), maxLen
	if uint64(maxLen) > blocks {
		return nil, damaged("its superblock says %d blocks, it has %d", maxLen, blocks)
	}
	if l.incompat()&incompatFast != 0 {
		n := be.Uint32(raw[sNumFCBlocks:])
		if n == 0 {
			n = defaultFCBlocks
		}
		if n >= maxLen {
			return nil, damaged("%d of %d blocks are for fast commits", n, maxLen)
		}
		l.last -= n
	}
	if l.first == 0 || l.last < l.first {
		return nil, damaged("its log is blocks %d to %d", l.first, l.last)
	}
	if l.last-l.first < minLog {
		return nil, fmt.Errorf("jbd2: a log of %d blocks is too small, at least %d are needed: %w", l.last-l.first, minLog, syscall.EOPNOTSUPP)
	}
	if start := be.Uint32(raw[sStart:]); start != 0 {
		return nil, fmt.Errorf("jbd2: %w (its log starts at block %d): %w", ErrNeedsRecovery, start, syscall.EUCLEAN)
	}
	l.derive()
	return l, nil
}

// incompat are the features in force; a superblock of version 1 has none.
func (l *log) incompat() uint32 {
	if be.Uint32(l.raw[sBlockType:]) != kindSuperV2 {
		return 0
	}
	return be.Uint32(l.raw[sIncompat:])
}

// derive works out what follows from the features.
func (l *log) derive() {
	f := l.incompat()
	l.wide = f&incompat64bit != 0
	l.csum, l.tail, l.tagSize = 0, 0, 8
	if l.wide {
		l.tagSize = 12
	}
	switch {
	case f&incompatCsumV3 != 0:
		l.csum, l.tail, l.tagSize = 3, 4, 16
	case f&incompatCsumV2 != 0:
		l.csum, l.tail = 2, 4
		l.tagSize += 2
	}
	l.uuid = make([]byte, uuidSize)
	if be.Uint32(l.raw[sBlockType:]) == kindSuperV2 {
		copy(l.uuid, l.raw[sUUID:])
	}
	l.seed = crc32c(^uint32(0), l.uuid)
	l.tagsPer = min((l.blockSize-headerSize-l.tail-uuidSize)/l.tagSize, max(maxPiece/l.blockSize, 16))
}

// addIncompat turns features on in memory, while the log is empty. Those of
// version 1, which has none, become version 2.
func (l *log) addIncompat(bits uint32) {
	if be.Uint32(l.raw[sBlockType:]) != kindSuperV2 {
		clear(l.raw[superV1Size:]) // undefined in version 1
		be.PutUint32(l.raw[sBlockType:], kindSuperV2)
		be.PutUint32(l.raw[sNrUsers:], 1)
	}
	be.PutUint32(l.raw[sIncompat:], l.incompat()|bits)
	l.derive()
}

// writeSuper notes where the log begins (start 0: it is empty) and with which
// transaction, and an error if there was one.
func (l *log) writeSuper(start, sequence uint32, errno int32) error {
	l.sbMu.Lock()
	defer l.sbMu.Unlock()
	be.PutUint32(l.raw[sStart:], start)
	be.PutUint32(l.raw[sSequence:], sequence)
	return l.storeSuper(errno)
}

// writeErrno notes an error and leaves the rest as it is.
func (l *log) writeErrno(errno int32) error {
	l.sbMu.Lock()
	defer l.sbMu.Unlock()
	return l.storeSuper(errno)
}

func (l *log) storeSuper(errno int32) error {
	if errno != 0 {
		be.PutUint32(l.raw[sErrno:], uint32(errno))
	}
	if l.csum != 0 {
		be.PutUint32(l.raw[sChecksum:], sumAround(^uint32(0), l.raw[:superSize], sChecksum))
	}
	if _, err := l.dev.WriteAt(l.raw[:superSize], l.offset(0)); err != nil {
		return fmt.Errorf("jbd2: journal superblock: %w", err)
	}
	return nil
}

// place gives the device's block of block n of the log and how many follow it in one piece.
func (l *log) place(n uint32) (blk uint64, together uint32) {
	k := sort.Search(len(l.starts), func(k int) bool { return l.starts[k] > n }) - 1
	skip := n - l.starts[k]
	return l.runs[k].Start + uint64(skip), l.runs[k].Count - skip
}

func (l *log) offset(n uint32) int64 {
	blk, _ := l.place(n)
	return int64(blk) * int64(l.blockSize)
}

// after is the block n behind pos, round the log's end.
func (l *log) after(pos, n uint32) uint32 {
	if pos += n; pos >= l.last {
		pos -= l.last - l.first
	}
	return pos
}

// write puts whole blocks at pos and behind, round the log's end, and gives the position after them.
func (l *log) write(pos uint32, data []byte) (uint32, error) {
	for len(data) > 0 {
		blk, n := l.place(pos)
		n = min(n, l.last-pos, uint32(len(data)/l.blockSize))
		piece := data[:int(n)*l.blockSize]
		if _, err := l.dev.WriteAt(piece, int64(blk)*int64(l.blockSize)); err != nil {
			return pos, fmt.Errorf("jbd2: log block %d: %w", pos, err)
		}
		data = data[len(piece):]
		pos = l.after(pos, n)
	}
	return pos, nil
}

// read fills p with block n of the log.
func (l *log) read(n uint32, p []byte) error {
	if _, err := l.dev.ReadAt(p, l.offset(n)); err != nil {
		return fmt.Errorf("jbd2: log block %d: %w", n, err)
	}
	return nil
}

// seal sets the checksum at the end of a descriptor or revoke block.
func (l *log) seal(p []byte) {
	if l.csum != 0 {
		at := len(p) - 4
		be.PutUint32(p[at:], sumAround(l.seed, p, at))
	}
}

// putTag writes the tag of a block whose stored bytes are data.
func (l *log) putTag(p []byte, blk uint64, flags, sequence uint32, data []byte) {
	var sum uint32
	if l.csum != 0 {
		var s [4]byte
		be.PutUint32(s[:], sequence)
		sum = crc32c(crc32c(l.seed, s[:]), data)
	}
	be.PutUint32(p, uint32(blk))
	if l.csum == 3 {
		be.PutUint32(p[4:], flags)
		if l.wide {
			be.PutUint32(p[8:], uint32(blk>>32))
		}
		be.PutUint32(p[12:], sum)
		return
	}
	be.PutUint16(p[4:], uint16(sum))
	be.PutUint16(p[6:], uint16(flags))
	if l.wide {
		be.PutUint32(p[8:], uint32(blk>>32))
	}
}

// revokesPer is the number of records a revoke block holds.
func (l *log) revokesPer() int { return (l.blockSize - revokeHeader - l.tail) / l.recordSize() }

func (l *log) recordSize() int {
	if l.wide {
		return 8
	}
	return 4
}
