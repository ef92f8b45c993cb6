package blockdev

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"syscall"

	"golang.org/x/sys/unix"
)

// The format of a delta file is docs/delta.md; the Python core's half is
// ext4lite/backing.py and ext4lite/delta.py.
const (
	deltaMagic   = "gvxdelta"
	deltaVersion = 1
	// DeltaBlock is the granularity of a delta in bytes, whatever the file system's blocks are.
	DeltaBlock = 4096

	pageHead  = 32
	pageWords = (DeltaBlock - pageHead) / 8
	pageBits  = pageWords * 64 // blocks that a page of the bitmap speaks for
	pagePair  = 2 * DeltaBlock // the two places of a page
	headers   = 2 * DeltaBlock // the two places of the header

	superOffset = 1024
	superSize   = 1024
	superSummed = 1020 // behind these is the superblock's own checksum; with it the sum would be a constant
	superMagic  = 0xef53
	incompat64  = 0x80
)

// ErrBacking is what every error about a delta's backing file wraps: it is missing,
// or not (any more) the one that the delta was made on.
var ErrBacking = errors.New("not the backing file that the delta was made on")

// ErrDelta is what errors about a damaged delta wrap.
var ErrDelta = errors.New("damaged delta")

// deltaHeader is the header of a delta file.
type deltaHeader struct {
	sequence    uint64
	id          [16]byte
	size        int64
	baseUUID    [16]byte
	baseSize    int64
	baseMtimeNs int64
	baseSuper   uint32
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sum is crc32c from ~0 without inversion at the end, as ext4 counts it.
func sum(p ...[]byte) uint32 {
	crc := uint32(0)
	for _, piece := range p {
		crc = crc32.Update(crc, castagnoli, piece)
	}
	return ^crc
}

// sumAt is the checksum of a block whose checksum field, at byte at, counts as zero.
func sumAt(p []byte, at int) uint32 {
	return sum(p[:at], []byte{0, 0, 0, 0}, p[at+4:])
}

func alignUp(n int64) int64 { return (n + DeltaBlock - 1) / DeltaBlock * DeltaBlock }

// deltaPages is the number of pages in the bitmap of a volume of size bytes.
func deltaPages(size int64) int64 {
	return (alignUp(size)/DeltaBlock + pageBits - 1) / pageBits
}

// deltaFileSize is the length of the delta file of a volume of size bytes.
func deltaFileSize(size int64) int64 {
	return alignUp(size) + deltaPages(size)*pagePair + headers
}

// coveredByVolume tells whether a superblock says that its volume reaches beyond end: what
// lies there is then a guest's data, whatever it looks like.
func coveredByVolume(super []byte, end int64) bool {
	if binary.LittleEndian.Uint16(super[56:]) != superMagic {
		return false
	}
	blocks := uint64(binary.LittleEndian.Uint32(super[4:]))
	if binary.LittleEndian.Uint32(super[96:])&incompat64 != 0 {
		blocks |= uint64(binary.LittleEndian.Uint32(super[0x150:])) << 32
	}
	shift := 10 + min(binary.LittleEndian.Uint32(super[24:]), 6)
	return blocks > uint64(end)>>shift
}

// readDeltaHeader reads the header of the file fd; nil for a plain image.
func readDeltaHeader(fd int) (*deltaHeader, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("blockdev: stat of descriptor %d: %w", fd, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size <= headers || st.Size%DeltaBlock != 0 {
		return nil, nil
	}
	f := file{fd: fd, size: st.Size}
	raw := make([]byte, headers)
	if _, err := f.ReadAt(raw[:superSize], superOffset); err != nil {
		return nil, err
	}
	if coveredByVolume(raw, st.Size-headers) {
		return nil, nil
	}
	if _, err := f.ReadAt(raw, st.Size-headers); err != nil {
		return nil, err
	}
	var best []byte
	damaged := false
	for _, p := range [][]byte{raw[:DeltaBlock], raw[DeltaBlock:]} {
		if string(p[:8]) != deltaMagic {
			continue
		}
		if binary.LittleEndian.Uint32(p[8:]) != sumAt(p, 8) {
			damaged = true
		} else if best == nil || binary.LittleEndian.Uint64(p[16:]) > binary.LittleEndian.Uint64(best[16:]) {
			best = p
		}
	}
	if best == nil {
		if damaged {
			return nil, fmt.Errorf("blockdev: both copies of the header are damaged: %w", ErrDelta)
		}
		return nil, nil
	}
	return parseDeltaHeader(best, st.Size)
}

func parseDeltaHeader(p []byte, length int64) (*deltaHeader, error) {
	le := binary.LittleEndian
	if version, flags := le.Uint32(p[12:]), le.Uint32(p[52:]); version != deltaVersion || flags != 0 {
		return nil, fmt.Errorf("blockdev: a delta of version %d with flags %#x: %w", version, flags, syscall.EOPNOTSUPP)
	}
	h := &deltaHeader{
		sequence:    le.Uint64(p[16:]),
		id:          [16]byte(p[24:]),
		size:        int64(le.Uint64(p[40:])),
		baseUUID:    [16]byte(p[56:]),
		baseSize:    int64(le.Uint64(p[72:])),
		baseMtimeNs: int64(le.Uint64(p[80:])),
		baseSuper:   le.Uint32(p[88:]),
	}
	if h.size <= 0 || h.size >= 1<<62 || h.baseSize < 0 || le.Uint32(p[48:]) != DeltaBlock || deltaFileSize(h.size) != length {
		return nil, fmt.Errorf("blockdev: a delta of %d bytes for a volume of %d: %w", length, h.size, ErrDelta)
	}
	return h, nil
}

// checkBase tells whether the file fd is the backing file that h names.
func (h *deltaHeader) checkBase(fd int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("blockdev: stat of the backing file: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return fmt.Errorf("blockdev: not a regular file: %w", ErrBacking)
	}
	if st.Size != h.baseSize || st.Mtim.Nano() != h.baseMtimeNs {
		return fmt.Errorf("blockdev: %d bytes, changed at %d, instead of %d and %d: %w", st.Size, st.Mtim.Nano(), h.baseSize, h.baseMtimeNs, ErrBacking)
	}
	super := make([]byte, superSize)
	if _, err := (&file{fd: fd, size: st.Size}).ReadAt(super, superOffset); err != nil {
		return fmt.Errorf("%w: %w", ErrBacking, err)
	}
	if binary.LittleEndian.Uint16(super[56:]) != superMagic || !bytes.Equal(super[104:120], h.baseUUID[:]) || sum(super[:superSummed]) != h.baseSuper {
		return fmt.Errorf("blockdev: its superblock has changed: %w", ErrBacking)
	}
	if own, err := readDeltaHeader(fd); err != nil || own != nil {
		return fmt.Errorf("blockdev: it is a delta itself: %w", ErrBacking)
	}
	return nil
}
