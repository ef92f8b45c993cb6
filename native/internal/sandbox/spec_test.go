package sandbox

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

// validSpec is a document that ParseEpisode accepts, to be spoilt by tests.
func validSpec() map[string]any {
	return map[string]any{
		"schema": Schema, "id": "ep-1", "rootfs": map[string]any{"fd": 5},
		"process":     map[string]any{"args": []string{"sh"}, "env": []string{"A=b", "EMPTY="}, "cwd": "/", "user": map[string]any{"uid": 0, "gid": 0, "additional_gids": []int{}}, "terminal": false},
		"hostname":    "box",
		"resources":   map[string]any{"memory_bytes": 1 << 30, "cpus": 2},
		"mounts":      []any{map[string]any{"kind": "volume", "fd": 6, "destination": "/v"}, map[string]any{"kind": "tmpfs", "destination": "/t", "size_bytes": 4096}},
		"network":     map[string]any{"mode": "nat", "publish": []any{map[string]any{"host": map[string]any{"kind": "unix", "path": "/s"}, "guest_port": 80}}},
		"lifeline_fd": 7, "events_fd": 8, "runtime_dir": "/run/x",
	}
}

func parse(t *testing.T, doc map[string]any) (*Episode, error) {
	t.Helper()
	raw, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	return ParseEpisode(strings.NewReader(string(raw)))
}

func TestParseEpisode(t *testing.T) {
	e, err := parse(t, validSpec())
	if err != nil {
		t.Fatal(err)
	}
	if e.Rootfs.FD != 5 || *e.LifelineFD != 7 || e.Network.Publish[0].GuestPort != 80 || *e.Mounts[0].FD != 6 || *e.StopGraceMS != DefaultStopGraceMillis {
		t.Errorf("parsed %+v", e)
	}
}

func TestDefaults(t *testing.T) {
	doc := validSpec()
	for _, key := range []string{"hostname", "resources", "mounts", "network", "lifeline_fd", "events_fd"} {
		delete(doc, key)
	}
	doc["id"] = "0123456789abcdef"
	e, err := parse(t, doc)
	if err != nil {
		t.Fatal(err)
	}
	if e.Hostname != "0123456789ab" || e.Network.Mode != NetworkNAT || e.LifelineFD != nil {
		t.Errorf("defaults are %+v", e)
	}
}

func TestInvalidEpisodes(t *testing.T) {
	object := func(doc map[string]any, key string) map[string]any { return doc[key].(map[string]any) }
	mount := func(doc map[string]any) map[string]any { return doc["mounts"].([]any)[0].(map[string]any) }
	publish := func(doc map[string]any) map[string]any {
		return object(doc, "network")["publish"].([]any)[0].(map[string]any)
	}
	for field, spoil := range map[string]func(map[string]any){
		"schema":                        func(d map[string]any) { d["schema"] = "gvx.episode/2" },
		"id":                            func(d map[string]any) { d["id"] = "../x" },
		"hostname":                      func(d map[string]any) { d["hostname"] = "a b" },
		"runtime_dir":                   func(d map[string]any) { d["runtime_dir"] = "x" },
		"stop_grace_ms":                 func(d map[string]any) { d["stop_grace_ms"] = -1 },
		"resources.cpus":                func(d map[string]any) { object(d, "resources")["cpus"] = -1 },
		"resources.memory_bytes":        func(d map[string]any) { object(d, "resources")["memory_bytes"] = 1000 },
		"process.args":                  func(d map[string]any) { object(d, "process")["args"] = []string{} },
		"process.args[0]":               func(d map[string]any) { object(d, "process")["args"] = []string{"a\x00b"} },
		"process.env[0]":                func(d map[string]any) { object(d, "process")["env"] = []string{"=x"} },
		"process.cwd":                   func(d map[string]any) { object(d, "process")["cwd"] = "x" },
		"process.terminal":              func(d map[string]any) { object(d, "process")["terminal"] = true },
		"process.user.uid":              func(d map[string]any) { object(object(d, "process"), "user")["uid"] = "root" },
		"rootfs.fd":                     func(d map[string]any) { object(d, "rootfs")["fd"] = 1 },
		"lifeline_fd":                   func(d map[string]any) { d["lifeline_fd"] = 5 },
		"mounts[0].fd":                  func(d map[string]any) { mount(d)["fd"] = 8 },
		"mounts[0].kind":                func(d map[string]any) { mount(d)["kind"] = "bind" },
		"mounts[0].destination":         func(d map[string]any) { mount(d)["destination"] = "/v/../w" },
		"mounts[0].durability":          func(d map[string]any) { mount(d)["durability"] = "disk" },
		"mounts[0].size_bytes":          func(d map[string]any) { mount(d)["size_bytes"] = 5 },
		"mounts[1].destination":         func(d map[string]any) { mount(d)["destination"] = "/t" },
		"network.mode":                  func(d map[string]any) { object(d, "network")["mode"] = "host" },
		"network.publish":               func(d map[string]any) { object(d, "network")["mode"] = "none" },
		"network.publish[0].guest_port": func(d map[string]any) { publish(d)["guest_port"] = 0 },
		"network.publish[0].host.kind":  func(d map[string]any) { object(publish(d), "host")["kind"] = "udp" },
		"network.publish[0].host.path":  func(d map[string]any) { object(publish(d), "host")["path"] = "/" + strings.Repeat("x", MaxSocketPath) },
		"network.publish[0].host.address": func(d map[string]any) {
			publish(d)["host"] = map[string]any{"kind": "tcp", "address": "localhost", "port": 0}
		},
		"(document)": func(d map[string]any) { d["surprise"] = 1 },
	} {
		doc := validSpec()
		spoil(doc)
		_, err := parse(t, doc)
		var spec *SpecError
		if !errors.As(err, &spec) {
			t.Errorf("%s spoilt: %v, not a SpecError", field, err)
		} else if spec.Field != field {
			t.Errorf("%s spoilt: the error blames %s (%s)", field, spec.Field, spec.Reason)
		}
	}
}

func TestDocumentsThatAreNone(t *testing.T) {
	for _, doc := range []string{"", "x", "[]", "{}", `{"schema":"gvx.episode/1"`} {
		var spec *SpecError
		if _, err := ParseEpisode(strings.NewReader(doc)); !errors.As(err, &spec) {
			t.Errorf("%q: %v, not a SpecError", doc, err)
		}
	}
	if _, err := ParseEpisode(strings.NewReader(strings.Repeat(" ", MaxSpecBytes+1))); err == nil {
		t.Error("a document without end is read")
	}
}

func TestEtcFiles(t *testing.T) {
	e := &Episode{Hostname: "box", Network: Network{Mode: NetworkNAT}}
	files := etcFiles(e)
	if files["/etc/resolv.conf"] != "nameserver 10.0.2.3\n" || !strings.Contains(files["/etc/hosts"], "10.0.2.15\tbox\n") || files["/etc/hostname"] != "box\n" {
		t.Errorf("%q", files)
	}
	e.Network.Mode = NetworkNone
	if files := etcFiles(e); files["/etc/resolv.conf"] != "" || strings.Contains(files["/etc/hosts"], "10.0.2") {
		t.Errorf("without a network: %q", files)
	}
}
