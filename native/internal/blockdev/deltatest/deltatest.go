// Package deltatest makes delta files for tests, after docs/delta.md and with none of blockdev's code.
package deltatest

import (
	"encoding/binary"
	"hash/crc32"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// New makes an empty delta over the image at base, and returns its path.
func New(t testing.TB, base string) string {
	t.Helper()
	f, err := os.Open(base)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	super := make([]byte, 1024)
	if _, err := f.ReadAt(super, 1024); err != nil {
		t.Fatal(err)
	}
	p := make([]byte, 4096)
	le := binary.LittleEndian
	copy(p, "gvxdelta")
	le.PutUint32(p[12:], 1)
	le.PutUint64(p[16:], 1)
	copy(p[24:], "this delta's id.")
	le.PutUint64(p[40:], uint64(st.Size))
	le.PutUint32(p[48:], 4096)
	copy(p[56:], super[104:120])
	le.PutUint64(p[72:], uint64(st.Size))
	le.PutUint64(p[80:], uint64(st.Mtim.Nano()))
	le.PutUint32(p[88:], ^crc32.Checksum(super[:1020], crc32.MakeTable(crc32.Castagnoli)))
	le.PutUint16(p[92:], uint16(copy(p[96:96+2000], base)))
	le.PutUint32(p[8:], ^crc32.Checksum(p, crc32.MakeTable(crc32.Castagnoli)))

	blocks := (st.Size + 4095) / 4096
	length := blocks*4096 + (blocks+32511)/32512*8192 + 8192
	path := filepath.Join(t.TempDir(), "delta")
	out, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if err := out.Truncate(length); err != nil {
		t.Fatal(err)
	}
	if _, err := out.WriteAt(p, length-8192); err != nil {
		t.Fatal(err)
	}
	return path
}
