package netnat

import (
	"net"
	"net/netip"
	"testing"
	"time"
)

func TestPolicyRanges(t *testing.T) {
	var p Policy
	for addr, want := range map[string]bool{
		"8.8.8.8": true, "1.1.1.1": true, "100.63.255.255": true, "172.15.0.1": true, "172.32.0.1": true, "11.0.0.1": true,
		"0.0.0.0": false, "10.1.2.3": false, "100.64.0.1": false, "100.100.100.200": false, "127.0.0.1": false, "127.8.8.8": false,
		"169.254.169.254": false, "172.16.0.1": false, "172.31.255.255": false, "192.168.0.1": false, "192.0.0.192": false,
		"224.0.0.251": false, "255.255.255.255": false, "::1": false, "2001:db8::1": false, "::ffff:127.0.0.1": false,
	} {
		if got := p.Allowed(netip.AddrPortFrom(netip.MustParseAddr(addr), 80)); got != want {
			t.Errorf("%s: allowed is %v", addr, got)
		}
	}
}

func TestPolicyDeniesHostsOwnAddresses(t *testing.T) {
	p := &Policy{hostAsked: time.Now(), hostAddrs: map[netip.Addr]struct{}{netip.MustParseAddr("8.8.4.4"): {}}}
	if p.Allowed(netip.MustParseAddrPort("8.8.4.4:22")) {
		t.Error("an address of this host's is allowed")
	}
	// And the real list is asked.
	var q Policy
	addrs, err := net.InterfaceAddrs()
	if err != nil || len(addrs) == 0 {
		t.Skipf("no interfaces to look at: %v", err)
	}
	if !q.isHost(netip.MustParsePrefix(addrs[0].String()).Addr()) {
		t.Errorf("%s is not taken for the host's", addrs[0])
	}
}

func TestPolicyAllow(t *testing.T) {
	p, err := NewPolicy([]string{"10.0.0.0/8:443", "192.168.7.0/24", "127.0.0.1:5000", "169.254.169.254"})
	if err != nil {
		t.Fatal(err)
	}
	for dst, want := range map[string]bool{
		"10.9.9.9:443": true, "10.9.9.9:80": false, "192.168.7.9:1": true, "192.168.8.9:1": false,
		"127.0.0.1:5000": true, "127.0.0.1:5001": false, "169.254.169.254:80": true,
	} {
		if got := p.Allowed(netip.MustParseAddrPort(dst)); got != want {
			t.Errorf("%s: allowed is %v", dst, got)
		}
	}
}

func TestPolicyResolvesNames(t *testing.T) {
	p, err := NewPolicy([]string{"localhost:8080"})
	if err != nil {
		t.Fatal(err)
	}
	dst := netip.MustParseAddrPort("127.0.0.1:8080")
	for deadline := time.Now().Add(5 * time.Second); !p.Allowed(dst); {
		if time.Now().After(deadline) {
			t.Fatal("localhost:8080 never became 127.0.0.1:8080")
		}
		time.Sleep(5 * time.Millisecond)
	}
	if p.Allowed(netip.MustParseAddrPort("127.0.0.1:8081")) {
		t.Error("another port is allowed")
	}
}

func TestAllowEntriesThatMeanNothing(t *testing.T) {
	for _, entry := range []string{"", "example.com", "10.0.0.0/33", "10.0.0.0/8:0", "10.0.0.1:65536", "fe80::/10", "host:http", ":80"} {
		if _, err := NewPolicy([]string{entry}); err == nil {
			t.Errorf("%q is accepted", entry)
		}
	}
}
