package image

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
)

// ConfigSchema is the version of the "gvx" member of config.json.
const ConfigSchema = "gvx.image/1"

// defaultPath is the PATH of an image that names none, as docker's.
const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Defaults is the "gvx" member of config.json: what an episode's process is made from, with nothing left to look up in the
// image.
type Defaults struct {
	Schema     string   `json:"schema"`
	Entrypoint []string `json:"entrypoint"`
	Cmd        []string `json:"cmd"`
	Env        []string `json:"env"` // has a PATH
	Cwd        string   `json:"cwd"`
	User       User     `json:"user"`
	StopSignal string   `json:"stop_signal"`
	Layers     []string `json:"layers"` // diff IDs, lowest first
	// Passwd and Group are the image's /etc/passwd and /etc/group, "" where it has none: an episode may name another user.
	Passwd string `json:"passwd"`
	Group  string `json:"group"`
}

// User is a user by numbers, resolved with the image's /etc/passwd and /etc/group.
type User struct {
	Name           string   `json:"name"` // as the image's config says
	UID            uint32   `json:"uid"`
	GID            uint32   `json:"gid"`
	AdditionalGIDs []uint32 `json:"additional_gids"`
	Home           string   `json:"home"`
}

// resolveConfig returns the OCI image config with the "gvx" member added.
func resolveConfig(raw []byte, cfg *v1.ConfigFile, tree *builder) ([]byte, error) {
	doc := map[string]json.RawMessage{}
	if err := json.Unmarshal(raw, &doc); err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	user, err := resolveUser(cfg.Config.User, tree)
	if err != nil {
		return nil, err
	}
	d := Defaults{
		Schema: ConfigSchema, Entrypoint: nonNil(cfg.Config.Entrypoint), Cmd: nonNil(cfg.Config.Cmd), Env: nonNil(cfg.Config.Env),
		Cwd: cfg.Config.WorkingDir, User: user, StopSignal: cfg.Config.StopSignal, Layers: []string{},
	}
	if d.Cwd == "" {
		d.Cwd = "/"
	}
	if d.StopSignal == "" {
		d.StopSignal = "SIGTERM"
	}
	if !slices.ContainsFunc(d.Env, func(e string) bool { return strings.HasPrefix(e, "PATH=") }) {
		d.Env = append([]string{defaultPath}, d.Env...)
	}
	if d.Passwd, err = tree.text("/etc/passwd"); err != nil {
		return nil, err
	}
	if d.Group, err = tree.text("/etc/group"); err != nil {
		return nil, err
	}
	for _, id := range cfg.RootFS.DiffIDs {
		d.Layers = append(d.Layers, id.String())
	}
	if doc["gvx"], err = json.Marshal(d); err != nil {
		return nil, err
	}
	out, err := json.MarshalIndent(doc, "", "  ")
	return append(out, '\n'), err
}

func nonNil(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

// resolveUser resolves "user", "uid", "user:group" in names or numbers, as docker does: a user's groups count only where
// no group is named.
func resolveUser(spec string, tree *builder) (User, error) {
	u := User{Name: spec, Home: "/", AdditionalGIDs: []uint32{}}
	userPart, groupPart, hasGroup := strings.Cut(spec, ":")
	if userPart == "" {
		userPart = "0"
	}
	passwd, err := tree.table("/etc/passwd", 7)
	if err != nil {
		return u, err
	}
	group, err := tree.table("/etc/group", 4)
	if err != nil {
		return u, err
	}
	login := ""
	number, numeric := parseID(userPart)
	found := false
	for _, f := range passwd {
		uid, ok := parseID(f[2])
		if !ok || f[0] != userPart && !(numeric && uid == number) {
			continue
		}
		u.UID, u.Home, login, found = uid, f[5], f[0], true
		if gid, ok := parseID(f[3]); ok {
			u.GID = gid
		}
		break
	}
	if !found {
		if !numeric {
			return u, fmt.Errorf("config: the user %q is not in the image's /etc/passwd", userPart)
		}
		u.UID = number
	}
	if u.Home == "" {
		u.Home = "/"
	}
	if hasGroup && groupPart != "" {
		gid, numeric := parseID(groupPart)
		found := numeric
		for _, f := range group {
			if f[0] == groupPart {
				if id, ok := parseID(f[2]); ok {
					gid, found = id, true
				}
			}
		}
		if !found {
			return u, fmt.Errorf("config: the group %q is not in the image's /etc/group", groupPart)
		}
		u.GID = gid
		return u, nil
	}
	for _, f := range group {
		gid, ok := parseID(f[2])
		if ok && login != "" && gid != u.GID && slices.Contains(strings.Split(f[3], ","), login) {
			u.AdditionalGIDs = append(u.AdditionalGIDs, gid)
		}
	}
	return u, nil
}

func parseID(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err == nil
}

// maxTable bounds what is kept of a user or group file.
const maxTable = 1 << 20

// text reads a file of the tree, at most maxTable bytes of it; no file is an empty one.
func (b *builder) text(name string) (string, error) {
	n, err := b.lookup(name)
	if err != nil || n.mode&unix.S_IFMT != unix.S_IFREG {
		return "", nil
	}
	if err := b.w.buf.Flush(); err != nil {
		return "", err
	}
	content, err := io.ReadAll(io.NewSectionReader(b.w.f, int64(n.block)*blockSize, min(n.size, maxTable)))
	return string(content), err
}

// table reads a colon-separated file of the tree; lines of fewer fields are skipped, and no file is an empty one.
func (b *builder) table(name string, fields int) ([][]string, error) {
	content, err := b.text(name)
	if err != nil {
		return nil, err
	}
	var out [][]string
	s := bufio.NewScanner(strings.NewReader(content))
	for s.Scan() {
		if f := strings.Split(s.Text(), ":"); len(f) >= fields {
			out = append(out, f)
		}
	}
	return out, s.Err()
}
