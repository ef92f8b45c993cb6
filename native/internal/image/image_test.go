package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/erofs/go-erofs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/klauspost/compress/zstd"
)

var when = time.Unix(1_700_000_000, 123_456_789)

// entry is a tar header with its contents.
type entry struct {
	tar.Header
	data string
}

func file(name, data string) entry {
	return entry{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, ModTime: when, Size: int64(len(data))}, data}
}

func dir(name string) entry {
	return entry{tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755, ModTime: when}, ""}
}

func link(kind byte, name, target string) entry {
	return entry{tar.Header{Typeflag: kind, Name: name, Linkname: target, Mode: 0o777, ModTime: when}, ""}
}

func layerTar(t *testing.T, entries ...entry) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		h := e.Header
		h.Format = tar.FormatPAX
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// build makes an image file of layers and has fsck.erofs judge it.
func build(t *testing.T, layers ...[]byte) string {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "root.erofs"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w, err := newErofsWriter(f, when.Unix())
	if err != nil {
		t.Fatal(err)
	}
	b := newBuilder(w)
	for _, l := range layers {
		if err := b.apply(bytes.NewReader(l)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.finish(b.root); err != nil {
		t.Fatal(err)
	}
	fsck(t, f.Name())
	return f.Name()
}

func fsck(t *testing.T, name string) {
	t.Helper()
	tool, err := exec.LookPath("fsck.erofs")
	if err != nil {
		t.Log("fsck.erofs is not installed: the image is judged by go-erofs only")
		return
	}
	if out, err := exec.Command(tool, name).CombinedOutput(); err != nil || bytes.Contains(out, []byte("<E>")) {
		t.Fatalf("fsck.erofs: %v\n%s", err, out)
	}
}

// tree reads an image with go-erofs, an implementation that is not ours, and returns a line an entry, sorted.
func tree(t *testing.T, name string) []string {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	img, err := erofs.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	inodes := map[uint64]string{}
	var out []string
	err = fs.WalkDir(img, ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*erofs.Stat)
		if st.Ino == 0 {
			t.Errorf("%s has the inode number 0, which means \"deleted\" to readdir", p)
		}
		line := fmt.Sprintf("%s %v %d:%d", p, st.Mode, st.UID, st.GID)
		switch {
		case info.Mode().IsRegular():
			data, err := fs.ReadFile(img, p)
			if err != nil {
				return err
			}
			if len(data) > 40 {
				line += fmt.Sprintf(" %x", sha256.Sum256(data))
			} else {
				line += fmt.Sprintf(" %q", data)
			}
			if st.Nlink > 1 {
				if first, ok := inodes[uint64(st.Ino)]; ok {
					line += " is " + first
				} else {
					inodes[uint64(st.Ino)] = p
				}
				line += fmt.Sprintf(" nlink %d", st.Nlink)
			}
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := img.(interface{ ReadLink(string) (string, error) }).ReadLink(p)
			if err != nil {
				return err
			}
			line += " -> " + target
		case info.Mode()&fs.ModeDevice != 0:
			line += fmt.Sprintf(" rdev %#x", st.Rdev)
		}
		names := make([]string, 0, len(st.Xattrs))
		for n := range st.Xattrs {
			names = append(names, n)
		}
		sort.Strings(names)
		for _, n := range names {
			line += fmt.Sprintf(" %s=%q", n, st.Xattrs[n])
		}
		if p != "." && !info.ModTime().Equal(when) && info.ModTime().Unix() != 0 {
			t.Errorf("%s has the time %v", p, info.ModTime())
		}
		out = append(out, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	sort.Strings(out)
	return out
}

func expect(t *testing.T, got []string, want ...string) {
	t.Helper()
	sort.Strings(want)
	if !slices.Equal(got, want) {
		t.Errorf("the tree is\n  %s\nand should be\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

func TestEveryKindOfEntry(t *testing.T) {
	owned := file("opt/owned", "x")
	owned.Uid, owned.Gid, owned.Mode = 100_000, 4_000_000_000, 0o6755
	capable := file("opt/capable", "x")
	capable.PAXRecords = map[string]string{
		"SCHILY.xattr.security.capability":                   "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
		"SCHILY.xattr.user.long-" + strings.Repeat("n", 200): strings.Repeat("v", 3000),
		"SCHILY.xattr.trusted.t":                             "1",
	}
	char := entry{tar.Header{Typeflag: tar.TypeChar, Name: "dev/char", Mode: 0o600, ModTime: when, Devmajor: 10, Devminor: 0x12345}, ""}
	fifo := entry{tar.Header{Typeflag: tar.TypeFifo, Name: "dev/fifo", Mode: 0o600, ModTime: when}, ""}
	sticky := dir("tmp/")
	sticky.Mode = 0o1777
	name := build(t, layerTar(t, dir("./"), dir("opt"), dir("dev"), sticky, owned, capable, char, fifo,
		file("opt/empty", ""), file("opt/block", strings.Repeat("a", 4096)), file("opt/more", strings.Repeat("b", 10_001)),
		link(tar.TypeSymlink, "opt/short", "../tmp"), link(tar.TypeSymlink, "opt/long", strings.Repeat("l", 4090))))
	expect(t, tree(t, name),
		". drwxr-xr-x 0:0", "opt drwxr-xr-x 0:0", "dev drwxr-xr-x 0:0", "tmp dtrwxrwxrwx 0:0",
		"opt/owned ugrwxr-xr-x 100000:4000000000 \"x\"",
		"opt/capable -rw-r--r-- 0:0 \"x\" security.capability="+fmt.Sprintf("%q", capable.PAXRecords["SCHILY.xattr.security.capability"])+
			" trusted.t=\"1\" user.long-"+strings.Repeat("n", 200)+"="+fmt.Sprintf("%q", strings.Repeat("v", 3000)),
		fmt.Sprintf("dev/char Dcrw------- 0:0 rdev %#x", encodeDevice(10, 0x12345)), "dev/fifo prw------- 0:0",
		"opt/empty -rw-r--r-- 0:0 \"\"",
		fmt.Sprintf("opt/block -rw-r--r-- 0:0 %x", sha256.Sum256([]byte(strings.Repeat("a", 4096)))),
		fmt.Sprintf("opt/more -rw-r--r-- 0:0 %x", sha256.Sum256([]byte(strings.Repeat("b", 10_001)))),
		"opt/short Lrwxrwxrwx 0:0 -> ../tmp", "opt/long Lrwxrwxrwx 0:0 -> "+strings.Repeat("l", 4090),
	)
}

// The Sentry maps executables straight from the image and refuses to where the data is within the inode.
func TestRegularFilesAreNeverInline(t *testing.T) {
	name := build(t, layerTar(t, file("small", "#!/bin/sh\n")))
	raw, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.HasPrefix(raw[blockSize:], []byte("#!/bin/sh\n\x00\x00")) {
		t.Error("the data is not in a block of its own")
	}
}

func TestLargeDirectory(t *testing.T) {
	entries := []entry{dir("many")}
	want := []string{". drwxr-xr-x 0:0", "many drwxr-xr-x 0:0"}
	for i := range 1500 {
		// Names that sort before "." too.
		name := fmt.Sprintf("many/%s%d-%s", []string{"-", "x", "!"}[i%3], i, strings.Repeat("n", i%200))
		entries = append(entries, file(name, "d"))
		want = append(want, name+" -rw-r--r-- 0:0 \"d\"")
	}
	expect(t, tree(t, build(t, layerTar(t, entries...))), want...)
}

func TestWhiteouts(t *testing.T) {
	lower := layerTar(t, dir("a"), file("a/1", "lower"), file("a/2", "lower"), dir("b"), dir("b/c"), file("b/c/3", "lower"), file("f", "lower"),
		dir("d"), file("d/4", "lower"))
	upper := layerTar(t, file("a/.wh.1", ""), file("b/c/new", "upper"), file("b/.wh..wh..opq", ""), file("b/late", "upper"),
		file(".wh.nothing", ""), file(".wh..wh.plnk", ""), dir("f"), file("f/inside", "upper"), file("d", "now a file"))
	expect(t, tree(t, build(t, lower, upper)),
		". drwxr-xr-x 0:0", "a drwxr-xr-x 0:0", "a/2 -rw-r--r-- 0:0 \"lower\"", "b drwxr-xr-x 0:0", "b/c drwxr-xr-x 0:0", "b/c/new -rw-r--r-- 0:0 \"upper\"",
		"b/late -rw-r--r-- 0:0 \"upper\"", "f drwxr-xr-x 0:0", "f/inside -rw-r--r-- 0:0 \"upper\"", "d -rw-r--r-- 0:0 \"now a file\"")
}

func TestHardLinks(t *testing.T) {
	lower := layerTar(t, dir("x"), dir("y"), file("x/one", "data"), link(tar.TypeLink, "y/two", "x/one"), link(tar.TypeLink, "three", "/y/two"))
	// A later layer replaces one name: the others keep the inode.
	upper := layerTar(t, file("x/one", "new"))
	expect(t, tree(t, build(t, lower)), ". drwxr-xr-x 0:0", "x drwxr-xr-x 0:0", "y drwxr-xr-x 0:0",
		"three -rw-r--r-- 0:0 \"data\" nlink 3", "x/one -rw-r--r-- 0:0 \"data\" is three nlink 3", "y/two -rw-r--r-- 0:0 \"data\" is three nlink 3")
	expect(t, tree(t, build(t, lower, upper)), ". drwxr-xr-x 0:0", "x drwxr-xr-x 0:0", "y drwxr-xr-x 0:0",
		"three -rw-r--r-- 0:0 \"data\" nlink 2", "x/one -rw-r--r-- 0:0 \"new\"", "y/two -rw-r--r-- 0:0 \"data\" is three nlink 2")
}

func TestSymlinkedParentsStayInTheRoot(t *testing.T) {
	lower := layerTar(t, dir("usr"), dir("usr/lib"), link(tar.TypeSymlink, "lib", "usr/lib"), link(tar.TypeSymlink, "out", "../../../../usr"))
	upper := layerTar(t, file("lib/libc.so", "elf"), file("out/file", "in usr"))
	expect(t, tree(t, build(t, lower, upper)), ". drwxr-xr-x 0:0", "lib Lrwxrwxrwx 0:0 -> usr/lib", "out Lrwxrwxrwx 0:0 -> ../../../../usr",
		"usr drwxr-xr-x 0:0", "usr/file -rw-r--r-- 0:0 \"in usr\"", "usr/lib drwxr-xr-x 0:0", "usr/lib/libc.so -rw-r--r-- 0:0 \"elf\"")
}

func TestLayersThatAreRefused(t *testing.T) {
	for what, layer := range map[string][]byte{
		"a name above the root": layerTar(t, file("a/../../etc/passwd", "x")),
		"a dangling hard link":  layerTar(t, link(tar.TypeLink, "a", "b")),
		"a directory link":      layerTar(t, dir("d"), link(tar.TypeLink, "a", "d")),
		"a symlink loop":        layerTar(t, link(tar.TypeSymlink, "a", "b"), link(tar.TypeSymlink, "b", "a"), file("a/x", "")),
		"a file as directory":   layerTar(t, file("a", ""), file("a/b", "")),
		"a cut-off stream":      layerTar(t, file("a", strings.Repeat("x", 5000)))[:3000],
	} {
		f, err := os.Create(filepath.Join(t.TempDir(), "x"))
		if err != nil {
			t.Fatal(err)
		}
		w, err := newErofsWriter(f, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := newBuilder(w).apply(bytes.NewReader(layer)); err == nil {
			t.Errorf("%s is accepted", what)
		}
		_ = f.Close()
	}
}

// memLayer is an uncompressed layer whose compressed form is of the test's choosing.
type memLayer struct {
	raw, packed []byte
	mediaType   types.MediaType
}

func (l *memLayer) Digest() (v1.Hash, error) { return sum(l.packed), nil }
func (l *memLayer) DiffID() (v1.Hash, error) { return sum(l.raw), nil }
func (l *memLayer) Compressed() (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(l.packed)), nil
}
func (l *memLayer) Uncompressed() (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(l.raw)), nil
}
func (l *memLayer) Size() (int64, error)                { return int64(len(l.packed)), nil }
func (l *memLayer) MediaType() (types.MediaType, error) { return l.mediaType, nil }

func sum(b []byte) v1.Hash {
	return v1.Hash{Algorithm: "sha256", Hex: fmt.Sprintf("%x", sha256.Sum256(b))}
}

// testImage has a gzip layer (through the library) and a zstd layer.
func testImage(t *testing.T) v1.Image {
	t.Helper()
	passwd := "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1001:,,,:/home/agent:/bin/sh\n"
	group := "root:x:0:\nagent:x:1001:\ndocker:x:999:agent\nother:x:5:root,agent\n"
	first := layerTar(t, dir("etc"), file("etc/passwd", passwd), file("etc/group", group))
	second := layerTar(t, file("hello", "world"))
	gz, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(first)), nil })
	if err != nil {
		t.Fatal(err)
	}
	enc, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(mutate.MediaType(empty.Image, types.OCIManifestSchema1), gz,
		&memLayer{second, enc.EncodeAll(second, nil), types.OCILayerZStd})
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture = guestOS, guestArch
	cfg.Config = v1.Config{Entrypoint: []string{"/entry"}, Cmd: []string{"a", "b"}, Env: []string{"X=1"}, WorkingDir: "/w", User: "agent"}
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		t.Fatal(err)
	}
	return img
}

// archives writes the image in every form that Import reads.
func archives(t *testing.T, img v1.Image) map[string]string {
	t.Helper()
	tmp := t.TempDir()
	out := map[string]string{"docker": filepath.Join(tmp, "docker.tar"), "layout": filepath.Join(tmp, "layout"), "layout tar": filepath.Join(tmp, "layout.tar"), "compressed": filepath.Join(tmp, "docker.tar.zst")}
	tag, err := name.NewTag("test/image:v1")
	if err != nil {
		t.Fatal(err)
	}
	if err := tarball.WriteToFile(out["docker"], tag, img); err != nil {
		t.Fatal(err)
	}
	p, err := layout.Write(out["layout"], empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.AppendImage(img, layout.WithAnnotations(map[string]string{containerdAnnotation: "docker.io/test/image:v1", refNameAnnotation: "v1"})); err != nil {
		t.Fatal(err)
	}
	if msg, err := exec.Command("tar", "-C", out["layout"], "-cf", out["layout tar"], ".").CombinedOutput(); err != nil {
		t.Fatalf("tar: %v %s", err, msg)
	}
	raw, err := os.ReadFile(out["docker"])
	if err != nil {
		t.Fatal(err)
	}
	enc, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(out["compressed"], enc.EncodeAll(raw, nil), 0o600); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestImportEveryForm(t *testing.T) {
	img := testImage(t)
	want, err := img.ConfigName()
	if err != nil {
		t.Fatal(err)
	}
	for form, archive := range archives(t, img) {
		t.Run(form, func(t *testing.T) {
			if form == "docker" || form == "compressed" {
				// The library's docker-archives hold the layers as they are: a zstd one keeps its form, too.
				t.Log("docker-archive")
			}
			cache, err := Open(filepath.Join(t.TempDir(), "cache"))
			if err != nil {
				t.Fatal(err)
			}
			for range 2 { // The second time, it is there.
				infos, err := cache.Import(archive, "mine")
				if err != nil {
					t.Fatal(err)
				}
				if len(infos) != 1 || infos[0].Digest != want.Hex || !slices.Equal(infos[0].Names, []string{"mine:latest", "test/image:v1"}) {
					t.Fatalf("imported %+v, not %s", infos, want.Hex)
				}
			}
			info, err := cache.Find("mine")
			if err != nil {
				t.Fatal(err)
			}
			fsck(t, filepath.Join(info.Path, rootName))
			if got := tree(t, filepath.Join(info.Path, rootName)); !slices.Contains(got, `hello -rw-r--r-- 0:0 "world"`) {
				t.Errorf("the tree is %q", got)
			}
			checkDefaults(t, filepath.Join(info.Path, configName))
		})
	}
}

func checkDefaults(t *testing.T, name string) {
	t.Helper()
	raw, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Config v1.Config `json:"config"`
		GVX    Defaults  `json:"gvx"`
	}
	if err := json.Unmarshal(raw, &doc); err != nil {
		t.Fatal(err)
	}
	g := doc.GVX
	user := fmt.Sprint(g.User)
	if !slices.Equal(g.Entrypoint, []string{"/entry"}) || !slices.Equal(g.Cmd, []string{"a", "b"}) || g.Cwd != "/w" || user != "{agent 1000 1001 [999 5] /home/agent}" {
		t.Errorf("defaults are %+v", g)
	}
	if !slices.Contains(g.Env, "X=1") || !strings.HasPrefix(g.Env[0], "PATH=/") {
		t.Errorf("environment is %q", g.Env)
	}
	if doc.Config.User != "agent" {
		t.Errorf("the image's own config is lost: %s", raw)
	}
}

func TestConcurrentImports(t *testing.T) {
	archive := archives(t, testImage(t))["layout"]
	dir := filepath.Join(t.TempDir(), "cache")
	var wg sync.WaitGroup
	errs := make([]error, 6)
	for i := range errs {
		wg.Add(1)
		go func() {
			defer wg.Done()
			cache, err := Open(dir)
			if err == nil {
				_, err = cache.Import(archive, fmt.Sprintf("name%d", i))
			}
			errs[i] = err
		}()
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	cache, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	all, err := cache.List()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 1 || len(all[0].Names) != len(errs)+1 {
		t.Errorf("after concurrent imports the cache lists %+v", all)
	}
	left, err := filepath.Glob(filepath.Join(dir, tempPrefix+"*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

func TestRemove(t *testing.T) {
	archive := archives(t, testImage(t))["layout"]
	cache, err := Open(filepath.Join(t.TempDir(), "cache"))
	if err != nil {
		t.Fatal(err)
	}
	infos, err := cache.Import(archive, "mine")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cache.Remove("mine"); err != nil {
		t.Fatal(err)
	}
	if _, err := cache.Find("mine"); !errors.Is(err, ErrNotFound) {
		t.Errorf("a removed name: %v", err)
	}
	if _, err := cache.Find("test/image:v1"); err != nil {
		t.Errorf("the other name went too: %v", err)
	}
	if _, err := cache.Remove("test/image:v1"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(infos[0].Path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the image is still there after its last name: %v", err)
	}
	if _, err := cache.Remove("no such"); !errors.Is(err, ErrNotFound) {
		t.Errorf("removing what is not there: %v", err)
	}
}

func TestDamagedLayerIsRefused(t *testing.T) {
	img := testImage(t)
	archive := archives(t, img)["docker"]
	raw, err := os.ReadFile(archive)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	r, err := layers[0].Compressed()
	if err != nil {
		t.Fatal(err)
	}
	packed, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.Index(raw, packed)
	if at < 0 {
		t.Fatal("the layer is not in the archive")
	}
	raw[at+len(packed)/2] ^= 0xff
	if err := os.WriteFile(archive, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "cache")
	cache, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if infos, err := cache.Import(archive, ""); err == nil {
		t.Fatalf("imported %+v from a damaged archive", infos)
	}
	if all, err := cache.List(); err != nil || len(all) != 0 {
		t.Errorf("after a failed import the cache lists %v %v", all, err)
	}
}

func TestArchivesThatAreNone(t *testing.T) {
	tmp := t.TempDir()
	write := func(name string, b []byte) string {
		p := filepath.Join(tmp, name)
		if err := os.WriteFile(p, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	cache, err := Open(filepath.Join(tmp, "cache"))
	if err != nil {
		t.Fatal(err)
	}
	for _, archive := range []string{write("empty", nil), write("text", []byte(strings.Repeat("text", 1000))), write("a tar", layerTar(t, file("x", "y"))), tmp, filepath.Join(tmp, "missing")} {
		if _, err := cache.Import(archive, ""); err == nil {
			t.Errorf("%s is accepted", archive)
		}
	}
}
