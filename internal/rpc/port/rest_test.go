package port_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/rpc/port"
)

const refusedCalls = 200

// refusing is a port of people that reports when a request with the header Late has been answered, its body aside.
func refusing(t *testing.T) (*fixture, chan struct{}) {
	t.Helper()
	answered := make(chan struct{}, 1)
	f := start(t, &backend{}, func(deps *port.Deps, cfg *port.Config) {
		cfg.TLS.Optional = true
		deps.Wrap = func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				next.ServeHTTP(w, r)
				if r.Header.Get("Late") != "" {
					answered <- struct{}{}
				}
			})
		}
	})
	return f, answered
}

// A refusal is whole for a client that sends its body when the refusal has been written already: the stream is not
// reset.
func TestRefusalsWaitForASmallBody(t *testing.T) {
	f, answered := refusing(t)
	call := func(contentType string) error {
		client := f.Client(t, "recovery", nil)
		defer client.CloseIdleConnections()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		body, writer := io.Pipe()
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.server.URL()+whoAmI, body)
		if err != nil {
			return err
		}
		req.Header.Set("Content-Type", contentType)
		req.Header.Set("Late", "yes")
		sent := make(chan error, 1)
		go func() {
			select {
			case <-answered:
			case <-ctx.Done(): // a call that failed must not take the next one's answer
				sent <- ctx.Err()
				return
			}
			_, open := writer.Write([]byte("{"))
			_, end := writer.Write([]byte("}"))
			sent <- errors.Join(open, end, writer.Close())
		}()
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		text, err := io.ReadAll(resp.Body)
		if contentType == "application/json" && !json.Valid(text) {
			err = errors.Join(err, fmt.Errorf("the refusal is not whole: %q", text))
		}
		return errors.Join(err, resp.Body.Close(), <-sent)
	}
	for _, contentType := range []string{"application/json", "text/plain"} {
		failed, first := 0, error(nil)
		for range refusedCalls {
			if err := call(contentType); err != nil {
				failed, first = failed+1, errors.Join(first, err)
			}
		}
		if failed > 0 {
			t.Errorf("%s: %d of %d calls failed: %.300s", contentType, failed, refusedCalls, first)
		}
	}
}

// Every early refusal is whole for curl, which speaks HTTP/2 and drops the received part of an answer whose stream is
// reset.
func TestRefusalsAreWholeForCurl(t *testing.T) {
	f, _ := refusing(t)
	dir := t.TempDir()
	sized := func(size int) string {
		path := filepath.Join(dir, fmt.Sprint(size))
		if err := os.WriteFile(path, []byte(strings.Repeat(" ", size)), 0o600); err != nil {
			t.Fatal(err)
		}
		return "@" + path
	}
	for _, c := range []struct {
		name, token, data, contentType, want string
		calls                                int
	}{
		{"a stranger", "garbage", "{}", "application/json", "unauthenticated", refusedCalls},
		{"a stranger with much", "garbage", sized(200 << 10), "application/json", "unauthenticated", 20},
		{"too large", "good", sized(3 << 20), "application/json", "resource_exhausted", 20},
		{"a stranger without a protocol", "garbage", "{}", "text/plain", "", 20},
	} {
		failed, first := 0, ""
		for range c.calls {
			out, err := exec.CommandContext(t.Context(), "curl", "-sS", "--http2", "--insecure",
				"-H", "Authorization: Bearer "+c.token, "-H", "Content-Type: "+c.contentType, "--data-binary", c.data,
				f.server.URL()+whoAmI).CombinedOutput()
			if err != nil || (c.want != "" && (!json.Valid(out) || !strings.Contains(string(out), c.want))) {
				failed, first = failed+1, fmt.Sprintf("%v: %s", err, out)
			}
		}
		if failed > 0 {
			t.Errorf("%s: %d of %d calls failed: %.300s", c.name, failed, c.calls, first)
		}
	}
}
