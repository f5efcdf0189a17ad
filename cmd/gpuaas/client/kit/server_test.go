package kit

import (
	"testing"
)

func TestHostPort(t *testing.T) {
	for server, want := range map[string]string{
		"127.0.0.1:7443": "127.0.0.1:7443", "https://mesh.test": "mesh.test:443", "https://mesh.test:1/": "mesh.test:1",
		"[::1]:5": "[::1]:5", "mesh.test": "mesh.test:443", "http://mesh.test": "", "https://user@mesh.test": "",
		"https://mesh.test/x": "", "https://mesh.test?a": "", "": "",
		"ftp://x": "",
	} {
		got, err := hostPort(server)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", server, got, err)
		}
	}
}
