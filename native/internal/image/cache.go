// Package image keeps root file systems: it turns docker-archives and OCI layouts into EROFS images in a cache that all
// episodes share read-only.
//
// A cache directory holds one directory an image, named by the config's digest as docker's image IDs are, with root.erofs
// and config.json in it; and names.json, a map from names to digests. Images are made beside their place and renamed into it, so that a
// reader sees a whole image or none.
package image

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
)

const (
	rootName   = "root.erofs"
	configName = "config.json"
	namesName  = "names.json"
	lockName   = ".lock"
	tempPrefix = ".import-"
)

// ErrNotFound is wrapped by errors about images that the cache does not have.
var ErrNotFound = errors.New("no such image in the cache")

// Cache is an image cache in a directory.
type Cache struct {
	dir string
}

// Info describes a cached image.
type Info struct {
	Digest string   `json:"digest"` // 64 hexadecimal digits, of the image's config
	Names  []string `json:"names"`
	Size   int64    `json:"size"` // bytes of root.erofs
	Path   string   `json:"path"` // the image's directory
}

// DefaultDir is where images are kept when nobody says otherwise: $XDG_CACHE_HOME/gvx/images, or ~/.cache/gvx/images.
func DefaultDir() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("image cache: %w (name a directory with --cache)", err)
	}
	return filepath.Join(dir, "gvx", "images"), nil
}

// Open returns the cache in dir, which is made when it does not exist.
func Open(dir string) (*Cache, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("image cache: %w", err)
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	return &Cache{abs}, nil
}

// Import brings every image of an archive into the cache and returns their descriptions. An image that is there already
// only gains names. name is a further name for the image of an archive that holds one.
func (c *Cache) Import(archive, name string) ([]Info, error) {
	sources, release, err := openArchive(archive, c.dir)
	defer release()
	if err != nil {
		return nil, err
	}
	if name != "" && len(sources) > 1 {
		return nil, fmt.Errorf("%s holds %d images: --name is for one", archive, len(sources))
	}
	c.sweep()
	var out []Info
	for _, s := range sources {
		if name != "" {
			s.names = normalizeNames(append(s.names, name))
		}
		info, err := c.importImage(s)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", archive, err)
		}
		out = append(out, info)
	}
	return out, nil
}

// importImage makes the image's directory unless it exists, and records its names.
func (c *Cache) importImage(s source) (Info, error) {
	hash, err := s.image.ConfigName()
	if err != nil {
		return Info{}, fmt.Errorf("config: %w", err)
	}
	dir := filepath.Join(c.dir, hash.Hex)
	if _, err := os.Stat(filepath.Join(dir, configName)); err != nil {
		if err := c.build(s.image, hash.Hex); err != nil {
			return Info{}, err
		}
	}
	err = c.editNames(func(names map[string]string) {
		for _, n := range s.names {
			names[n] = hash.Hex
		}
	})
	if err != nil {
		return Info{}, err
	}
	return c.Find(hash.Hex)
}

// build makes the image in a temporary directory and renames that. Of two that build the same at once, both succeed.
func (c *Cache) build(img v1.Image, digest string) error {
	tmp, err := os.MkdirTemp(c.dir, tempPrefix)
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	lock, err := os.Open(tmp)
	if err != nil {
		return err
	}
	defer lock.Close()
	// The lock tells sweep that this directory's maker lives.
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	raw, err := img.RawConfigFile()
	if err != nil {
		return fmt.Errorf("config: %w", err)
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		return fmt.Errorf("config: %w", err)
	}
	if cfg.OS != "" && cfg.OS != guestOS || cfg.Architecture != "" && cfg.Architecture != guestArch {
		return fmt.Errorf("the image is for %s/%s, not %s/%s", cfg.OS, cfg.Architecture, guestOS, guestArch)
	}
	root, err := os.OpenFile(filepath.Join(tmp, rootName), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	defer root.Close()
	tree, err := writeRoot(img, cfg, root)
	if err != nil {
		return err
	}
	doc, err := resolveConfig(raw, cfg, tree)
	if err != nil {
		return err
	}
	if err := root.Sync(); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(tmp, configName), doc, 0o644); err != nil {
		return err
	}
	// MkdirTemp makes it private; who may read the cache's directory may read the image.
	if err := os.Chmod(tmp, 0o755); err != nil {
		return err
	}
	dst := filepath.Join(c.dir, digest)
	if err := os.Rename(tmp, dst); err != nil && !errors.Is(err, fs.ErrExist) && !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	return nil
}

// writeRoot merges the layers of an image into an EROFS image in f, checking each against its diff ID.
func writeRoot(img v1.Image, cfg *v1.ConfigFile, f *os.File) (*builder, error) {
	layers, err := img.Layers()
	if err != nil {
		return nil, fmt.Errorf("layers: %w", err)
	}
	if len(layers) != len(cfg.RootFS.DiffIDs) {
		return nil, fmt.Errorf("%d layers, but the config names %d", len(layers), len(cfg.RootFS.DiffIDs))
	}
	timestamp := int64(0)
	if !cfg.Created.IsZero() {
		timestamp = cfg.Created.Unix()
	}
	w, err := newErofsWriter(f, timestamp)
	if err != nil {
		return nil, err
	}
	b := newBuilder(w)
	for i, l := range layers {
		if err := applyLayer(b, l, cfg.RootFS.DiffIDs[i]); err != nil {
			return nil, err
		}
	}
	return b, w.finish(b.root)
}

func applyLayer(b *builder, l v1.Layer, diffID v1.Hash) error {
	r, err := l.Uncompressed()
	if err != nil {
		return fmt.Errorf("layer %s: %w", diffID, err)
	}
	defer r.Close()
	sum := sha256.New()
	hashed := io.TeeReader(r, sum)
	if err := b.apply(hashed); err != nil {
		return err
	}
	// A tar stream may be longer than its end mark, and the digest is of all of it.
	if _, err := io.Copy(io.Discard, hashed); err != nil {
		return fmt.Errorf("layer %s: %w", diffID, err)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != diffID.Hex {
		return fmt.Errorf("layer %s is damaged: its contents have the digest %s", diffID, got)
	}
	return nil
}

// sweep removes what importers that were killed left behind.
func (c *Cache) sweep() {
	entries, err := filepath.Glob(filepath.Join(c.dir, tempPrefix+"*"))
	if err != nil {
		return
	}
	for _, dir := range entries {
		f, err := os.Open(dir)
		if err != nil {
			continue
		}
		st, err := f.Stat()
		// A young one may not have its lock yet.
		if err == nil && time.Since(st.ModTime()) > time.Minute && unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			_ = os.RemoveAll(dir)
		}
		_ = f.Close()
	}
}

var digestPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

// List returns all images, by digest.
func (c *Cache) List() ([]Info, error) {
	names, err := c.readNames()
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		return nil, err
	}
	out := []Info{}
	for _, e := range entries {
		if !digestPattern.MatchString(e.Name()) {
			continue
		}
		info := Info{Digest: e.Name(), Names: []string{}, Path: filepath.Join(c.dir, e.Name())}
		st, err := os.Stat(filepath.Join(info.Path, rootName))
		if err != nil {
			continue // Being removed.
		}
		info.Size = st.Size()
		for n, d := range names {
			if d == info.Digest {
				info.Names = append(info.Names, n)
			}
		}
		sort.Strings(info.Names)
		out = append(out, info)
	}
	return out, nil
}

// Find returns the image with a name, a digest, or a digest's beginning of at least six digits.
func (c *Cache) Find(ref string) (Info, error) {
	all, err := c.List()
	if err != nil {
		return Info{}, err
	}
	digest := strings.TrimPrefix(ref, "sha256:")
	var found []Info
	for _, i := range all {
		if slices.Contains(i.Names, ref) || slices.Contains(i.Names, ref+":latest") {
			return i, nil
		}
		if len(digest) >= 6 && strings.HasPrefix(i.Digest, digest) {
			found = append(found, i)
		}
	}
	switch len(found) {
	case 0:
		return Info{}, fmt.Errorf("%q: %w", ref, ErrNotFound)
	case 1:
		return found[0], nil
	}
	return Info{}, fmt.Errorf("%q is the beginning of %d images' digests", ref, len(found))
}

// Remove removes a name, and the image when that was its last; a digest removes the image with all its names. Episodes
// that run from it go on: they hold the file open.
func (c *Cache) Remove(ref string) (Info, error) {
	info, err := c.Find(ref)
	if err != nil {
		return Info{}, err
	}
	last := true
	err = c.editNames(func(names map[string]string) {
		named := false
		for _, n := range []string{ref, ref + ":latest"} {
			if names[n] == info.Digest {
				delete(names, n)
				named = true
				break
			}
		}
		for n, d := range names {
			switch {
			case d != info.Digest:
			case named:
				last = false
			default:
				delete(names, n)
			}
		}
	})
	if err != nil || !last {
		return info, err
	}
	// Renamed first, so that nobody finds half an image.
	tmp, err := os.MkdirTemp(c.dir, tempPrefix)
	if err != nil {
		return info, err
	}
	if err := os.Rename(info.Path, filepath.Join(tmp, info.Digest)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return info, err
	}
	return info, os.RemoveAll(tmp)
}

func (c *Cache) readNames() (map[string]string, error) {
	names := map[string]string{}
	raw, err := os.ReadFile(filepath.Join(c.dir, namesName))
	if errors.Is(err, fs.ErrNotExist) {
		return names, nil
	}
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(raw, &names); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(c.dir, namesName), err)
	}
	return names, nil
}

// editNames changes names.json under a lock and replaces it atomically: readers need no lock.
func (c *Cache) editNames(edit func(map[string]string)) error {
	lock, err := os.OpenFile(filepath.Join(c.dir, lockName), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	defer lock.Close() // Closing unlocks.
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	names, err := c.readNames()
	if err != nil {
		return err
	}
	edit(names)
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetIndent("", "  ")
	if err := enc.Encode(names); err != nil {
		return err
	}
	tmp := filepath.Join(c.dir, namesName+".new")
	if err := os.WriteFile(tmp, buf.Bytes(), 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(c.dir, namesName))
}
