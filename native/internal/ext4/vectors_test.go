package ext4_test

import (
	"bufio"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"gvx.dev/gvx/native/internal/blockdev"
	"gvx.dev/gvx/native/internal/ext4"
)

// entry is one line of a manifest (docs/ext4lite.md).
type entry struct {
	Path    string            `json:"path"`
	Type    string            `json:"type"`
	Mode    uint16            `json:"mode"`
	UID     uint32            `json:"uid"`
	GID     uint32            `json:"gid"`
	Nlink   uint32            `json:"nlink"`
	MtimeNs int64             `json:"mtime_ns"`
	Size    int64             `json:"size"`
	SHA256  string            `json:"sha256"`
	Target  string            `json:"target"`
	Rdev    []uint32          `json:"rdev"`
	Xattrs  map[string][]byte `json:"xattrs"`
}

var typeNames = map[uint16]string{0x1000: "fifo", 0x2000: "char", 0x4000: "dir", 0x6000: "block", 0x8000: "file", 0xa000: "symlink", 0xc000: "socket"}

// jsonText is s as encoding/json reads it from a manifest: there a byte that is not
// UTF-8 is a lone surrogate, which decodes to the replacement character.
func jsonText(s string) string {
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		b.WriteRune(r)
		s = s[n:]
	}
	return b.String()
}

func describe(t *testing.T, path string, ino *ext4.Inode) entry {
	t.Helper()
	a := ino.Attr()
	e := entry{
		Path: jsonText(path), Type: typeNames[a.Mode&0xf000], Mode: a.Mode & 0o7777, UID: a.UID, GID: a.GID, Nlink: a.Nlink,
		MtimeNs: a.Mtime.Sec*1e9 + int64(a.Mtime.Nsec),
	}
	switch e.Type {
	case "file":
		e.Size = a.Size
		h := sha256.New()
		if _, err := io.Copy(h, io.NewSectionReader(readerAt{ino}, 0, a.Size)); err != nil {
			t.Fatalf("%s: read: %v", path, err)
		}
		e.SHA256 = hex.EncodeToString(h.Sum(nil))
	case "symlink":
		target, err := ino.Readlink()
		if err != nil {
			t.Fatalf("%s: readlink: %v", path, err)
		}
		e.Target = jsonText(target)
	case "char", "block":
		e.Rdev = []uint32{a.RdevMajor, a.RdevMinor}
	}
	names, err := ino.ListXattr()
	if err != nil {
		t.Fatalf("%s: listxattr: %v", path, err)
	}
	for _, name := range names {
		value, err := ino.GetXattr(name)
		if err != nil {
			t.Fatalf("%s: getxattr %s: %v", path, name, err)
		}
		if e.Xattrs == nil {
			e.Xattrs = map[string][]byte{}
		}
		e.Xattrs[name] = append([]byte{}, value...)
	}
	return e
}

// readerAt gives an inode the io.ReaderAt contract (EOF on a short read).
type readerAt struct{ *ext4.Inode }

func (r readerAt) ReadAt(p []byte, off int64) (int, error) {
	n, err := r.Inode.ReadAt(p, off)
	if err == nil && n < len(p) {
		err = io.EOF
	}
	return n, err
}

func walk(t *testing.T, prefix string, dir *ext4.Inode, found map[string]entry) {
	t.Helper()
	var children []ext4.Dirent
	if err := dir.ReadDir(0, func(d ext4.Dirent) bool { children = append(children, d); return true }); err != nil {
		t.Fatalf("%s: readdir: %v", prefix, err)
	}
	for _, d := range children {
		path := prefix + "/" + d.Name
		if path == "/lost+found" {
			continue
		}
		ino, err := dir.Lookup(d.Name)
		if err != nil {
			t.Fatalf("%s: lookup: %v", path, err)
		}
		e := describe(t, path, ino)
		found[e.Path] = e
		if e.Type == "dir" {
			walk(t, path, ino, found)
		}
		ino.DecRef()
	}
}

func gunzip(t *testing.T, path string) io.Reader {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	return z
}

// TestVectors reads the images of fixtures/vectors, which the Python core reads too:
// what is in them was told by the kernel.
func TestVectors(t *testing.T) {
	images, err := filepath.Glob("../../../fixtures/vectors/*.ext4.gz")
	if err != nil || len(images) < 6 {
		t.Fatalf("vectors missing: %v %v", images, err)
	}
	for _, packed := range images {
		name := strings.TrimSuffix(filepath.Base(packed), ".ext4.gz")
		t.Run(name, func(t *testing.T) {
			image := unpack(t, packed)
			dev, err := blockdev.NewFile(int(image.Fd()), true)
			if err != nil {
				t.Fatal(err)
			}
			checkVector(t, dev, strings.TrimSuffix(packed, ".ext4.gz")+".jsonl.gz")
		})
	}
}

// checkVector compares what is on a device with a manifest.
func checkVector(t *testing.T, dev blockdev.Device, manifest string) {
	t.Helper()
	fs, err := ext4.Open(dev, ext4.Options{ReadOnly: true})
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	defer fs.Close()
	found := map[string]entry{}
	walk(t, "", fs.Root(), found)
	lines := bufio.NewScanner(gunzip(t, manifest))
	lines.Buffer(nil, 1<<20)
	expected := 0
	for lines.Scan() {
		var want entry
		if err := json.Unmarshal(lines.Bytes(), &want); err != nil {
			t.Fatal(err)
		}
		expected++
		if got := found[want.Path]; !reflect.DeepEqual(got, want) {
			t.Errorf("%q:\n got %s\nwant %s", want.Path, short(got), short(want))
		}
	}
	if expected != len(found) || expected < 400 {
		t.Errorf("%d entries found, %d expected", len(found), expected)
	}
}

// unpack unpacks a file of fixtures/vectors.
func unpack(t *testing.T, packed string) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := io.Copy(f, gunzip(t, packed)); err != nil {
		t.Fatal(err)
	}
	return f
}

// TestDeltaVectors reads deltas over other vectors, written by the Python core; the places in them that do not count
// are torn. A backing file must have the time that the generator gave it.
func TestDeltaVectors(t *testing.T) {
	const dir = "../../../fixtures/vectors/"
	mtime := time.Unix(0, 1_700_000_000_123_456_789)
	for name, base := range map[string]string{"delta-profile": "profile", "delta-1k": "ext4-1k"} {
		t.Run(name, func(t *testing.T) {
			b := unpack(t, dir+base+".ext4.gz")
			if err := os.Chtimes(b.Name(), mtime, mtime); err != nil {
				t.Fatal(err)
			}
			dev, err := blockdev.NewDelta(int(unpack(t, dir+name+".delta.gz").Fd()), int(b.Fd()), blockdev.DeltaOptions{ReadOnly: true})
			if err != nil {
				t.Fatal(err)
			}
			checkVector(t, dev, dir+name+".jsonl.gz")
		})
	}
}

func short(e entry) string {
	s := fmt.Sprintf("%+v", e)
	return s[:min(len(s), 400)]
}
