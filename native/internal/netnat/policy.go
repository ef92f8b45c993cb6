package netnat

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"
)

// denied lists what an untrusted guest may not reach unless the episode allows it. Source: the IANA IPv4
// Special-Purpose Address Registry (RFC 6890 and its updates); everything there that is not globally reachable, plus multicast.
var denied = mustPrefixes(
	"0.0.0.0/8",       // this network: Linux takes 0.0.0.0 for the local host
	"10.0.0.0/8",      // private
	"100.64.0.0/10",   // carrier-grade NAT, and the metadata services of some clouds
	"127.0.0.0/8",     // the host's loopback
	"169.254.0.0/16",  // link-local, where cloud metadata is
	"172.16.0.0/12",   // private
	"192.0.0.0/24",    // IETF protocol assignments (Oracle's metadata is at 192.0.0.192)
	"192.0.2.0/24",    // documentation
	"192.168.0.0/16",  // private
	"198.18.0.0/15",   // benchmarking
	"198.51.100.0/24", // documentation
	"203.0.113.0/24",  // documentation
	"224.0.0.0/4",     // multicast
	"240.0.0.0/4",     // reserved, and 255.255.255.255
)

// hostAddrTTL is how long the host's own addresses are remembered: they change rarely, and asking is a netlink dump.
const hostAddrTTL = 5 * time.Second

func mustPrefixes(list ...string) []netip.Prefix {
	out := make([]netip.Prefix, len(list))
	for i, s := range list {
		out[i] = netip.MustParsePrefix(s)
	}
	return out
}

// rule is one allowed destination; port 0 stands for every port.
type rule struct {
	prefix netip.Prefix
	port   uint16
}

// Policy decides which destinations the guest may reach. The zero value is the default policy: the public Internet, and
// neither this host (its loopback and its own addresses) nor link-local, private or reserved ranges.
//
// A Policy is safe for concurrent use.
type Policy struct {
	mu    sync.RWMutex
	rules []rule

	hostMu    sync.Mutex
	hostAddrs map[netip.Addr]struct{}
	hostAsked time.Time
}

// NewPolicy parses a list of allowed destinations: "CIDR", "CIDR:port", "address", "address:port" or "name:port".
// Names are resolved in the background with the host's resolver (a slow one must not delay the start), at most for ten
// seconds; until then, and where that fails, they allow nothing.
func NewPolicy(allow []string) (*Policy, error) {
	p := &Policy{}
	for _, entry := range allow {
		r, name, err := parseAllow(entry)
		if err != nil {
			return nil, err
		}
		if name == "" {
			p.rules = append(p.rules, r)
			continue
		}
		go p.resolve(name, r.port)
	}
	return p, nil
}

func (p *Policy) resolve(name string, port uint16) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip4", name)
	if err != nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range addrs {
		p.rules = append(p.rules, rule{netip.PrefixFrom(a.Unmap(), 32), port})
	}
}

// parseAllow returns the rule of one entry, and the name to resolve where the entry holds one.
func parseAllow(entry string) (rule, string, error) {
	host, port := entry, uint16(0)
	if h, ps, found := strings.Cut(entry, ":"); found {
		n, err := strconv.ParseUint(ps, 10, 16)
		if err != nil || n == 0 {
			return rule{}, "", fmt.Errorf("allowed destination %q: %q is no port", entry, ps)
		}
		host, port = h, uint16(n)
	}
	if strings.Contains(host, "/") {
		pfx, err := netip.ParsePrefix(host)
		if err != nil || !pfx.Addr().Is4() {
			return rule{}, "", fmt.Errorf("allowed destination %q: %q is no IPv4 network", entry, host)
		}
		return rule{pfx.Masked(), port}, "", nil
	}
	if a, err := netip.ParseAddr(host); err == nil && a.Is4() {
		return rule{netip.PrefixFrom(a, 32), port}, "", nil
	}
	if host == "" || strings.ContainsAny(host, " \t/") {
		return rule{}, "", fmt.Errorf("allowed destination %q: no network, address or name", entry)
	}
	if port == 0 {
		return rule{}, "", fmt.Errorf("allowed destination %q: a name needs a port (name:port)", entry)
	}
	return rule{port: port}, host, nil
}

// errDenied is what a refused destination fails with.
var errDenied = errors.New("destination denied by the network policy")

// Allowed tells whether the guest may reach a destination (an address of the host's side, after translation).
func (p *Policy) Allowed(dst netip.AddrPort) bool {
	addr := dst.Addr().Unmap()
	p.mu.RLock()
	for _, r := range p.rules {
		if r.prefix.Contains(addr) && (r.port == 0 || r.port == dst.Port()) {
			p.mu.RUnlock()
			return true
		}
	}
	p.mu.RUnlock()
	for _, d := range denied {
		if d.Contains(addr) {
			return false
		}
	}
	return addr.Is4() && !p.isHost(addr)
}

// isHost tells whether an address is one of this host's: a connection to it reaches what listens on every interface,
// as one to 127.0.0.1 does. When the addresses cannot be told, every address counts as the host's: refusing is safe.
func (p *Policy) isHost(addr netip.Addr) bool {
	p.hostMu.Lock()
	defer p.hostMu.Unlock()
	if p.hostAddrs == nil || time.Since(p.hostAsked) > hostAddrTTL {
		list, err := net.InterfaceAddrs()
		if err != nil {
			return true
		}
		p.hostAddrs = map[netip.Addr]struct{}{}
		p.hostAsked = time.Now()
		for _, a := range list {
			if n, ok := a.(*net.IPNet); ok {
				if ip, ok := netip.AddrFromSlice(n.IP); ok {
					p.hostAddrs[ip.Unmap()] = struct{}{}
				}
			}
		}
	}
	_, ok := p.hostAddrs[addr]
	return ok
}
