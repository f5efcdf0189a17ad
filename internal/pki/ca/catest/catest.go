// Package catest runs smallstep's step-ca in a test.
package catest

import (
	"errors"
	"net/http"
	"testing"

	"github.com/smallstep/certificates/authority/config"
	"github.com/smallstep/certificates/ca"
)

// Start runs the authority of a configuration file as the program step-ca does, with its own TLS listener, until the
// test ends.
func Start(t *testing.T, path string) {
	t.Helper()
	settings, err := config.LoadConfiguration(path)
	if err != nil {
		t.Fatal(err)
	}
	process, err := ca.New(settings, ca.WithConfigFile(path), ca.WithQuiet(true))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- process.Run() }()
	t.Cleanup(func() {
		if err := process.Stop(); err != nil {
			t.Errorf("stop the authority: %v", err)
		}
		if err := <-done; err != nil && !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("the authority ended: %v", err)
		}
	})
}
