package hostfacts

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// below returns a Config whose root has the given files.
func below(t *testing.T, files map[string]string) Config {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return Config{Root: root}
}

func TestContainerRuntime(t *testing.T) {
	const status = "var/lib/dpkg/status"
	pkg := func(name, state, version string) string {
		return "Package: " + name + "\nStatus: " + state + "\nVersion: " + version + "\nDescription: x\n more\n\n"
	}
	self, err := os.Executable() // a program built from a module
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		files map[string]string
		want  string
	}{
		"nothing": {nil, ""},
		"packages": {
			map[string]string{status: pkg("zlib", "install ok installed", "1") +
				pkg("containerd.io", "install ok installed", "1.7.22-1") + pkg("runc", "install ok installed", "1.1.14")},
			"containerd 1.7.22-1, runc 1.1.14",
		},
		"a package that was removed": {
			map[string]string{status: pkg("containerd", "deinstall ok config-files", "1.7.22")}, "",
		},
		"hostile": {
			map[string]string{status: pkg("containerd", "install ok installed", "1\x1b[31m"+strings.Repeat("7", 1<<12))},
			("containerd 1[31m" + strings.Repeat("7", 1<<12))[:256],
		},
		"no program": {map[string]string{"usr/local/bin/containerd": "#!/bin/sh\n"}, ""},
	} {
		if got := below(t, c.files).containerRuntime(); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	built := below(t, map[string]string{"usr/local/bin/containerd": string(program)})
	if got := built.containerRuntime(); got != "" && !strings.HasPrefix(got, "containerd ") {
		t.Errorf("a program that was built from a module: %q", got)
	}
}

func TestOwnAddressesOfATableOfRoutes(t *testing.T) {
	const trie = `Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 10.0.0.0/24 2 0 2
        |-- 10.0.0.0
           /24 link UNICAST
        |-- 10.0.0.4
           /32 host LOCAL
        |-- 10.0.0.255
           /32 link BROADCAST
     |-- 127.0.0.1
        /32 host LOCAL
Local:
        |-- 10.0.0.4
           /32 host LOCAL
`
	c := below(t, map[string]string{"proc/net/fib_trie": trie})
	if got := c.addresses(); !slices.Equal(got, []string{"10.0.0.4"}) {
		t.Errorf("the addresses are %v", got)
	}
	c = below(t, map[string]string{
		"proc/net/fib_trie": trie, "proc/net/if_inet6": "fd000000000000000000000000000002 04 40 00 82     eth0\n" +
			"00000000000000000000000000000001 01 80 10 80       lo\n" +
			"fe8000000000000000fc00fffe000001 04 40 20 80     eth0\nfd00 04\n\n",
	})
	if got := c.addresses(); !slices.Equal(got, []string{"10.0.0.4", "fd00::2"}) {
		t.Errorf("the addresses with IPv6 are %v", got)
	}
	if got := ownAddresses(strings.Repeat("/32 host LOCAL\n|--\n", 10)); len(got) != 0 {
		t.Errorf("addresses of a broken table: %v", got)
	}
	if got := ownAddresses("|-- 10.0.0.9\n/32 host LOCAL\n"); len(got) != 1 || !got[0].Equal(net.ParseIP("10.0.0.9")) {
		t.Errorf("the addresses are %v", got)
	}
}
