package recovery

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pki"
)

// profileEvery is the least time between two checks whether the file of certificate authorities has changed.
const profileEvery = 2 * time.Second

// profiles has the profile that agents are sent, with the present content of the file of certificate authorities. A
// file that cannot be read is logged, and read again at the next check; until then the profile keeps the content that
// was read before. It is safe for concurrent use.
type profiles struct {
	logger *slog.Logger
	cfg    Profile
	every  time.Duration // see profileEvery

	mu       sync.Mutex
	profile  *commonv1.Profile // replaced, never changed
	file     string            // describes the file that was read
	failure  string            // the logged failure of the last check; empty if it succeeded
	checked  time.Time
	checking bool // a caller is checking the file
}

// readProfile reads the profile for the first time.
func readProfile(logger *slog.Logger, cfg Profile) (*profiles, error) {
	p := &profiles{logger: logger, cfg: cfg, every: profileEvery, file: describeFile(cfg.CAFile), checked: time.Now()}
	var err error
	if p.profile, err = p.read(); err != nil {
		return nil, err
	}
	return p, nil
}

// current returns the profile, read anew if the file has changed. One caller at a time checks the file; the others do
// not wait for it, since the file system may hang.
func (p *profiles) current() *commonv1.Profile {
	p.mu.Lock()
	if p.checking || time.Since(p.checked) < p.every {
		defer p.mu.Unlock()
		return p.profile
	}
	p.checking, p.checked = true, time.Now()
	former := p.file
	p.mu.Unlock()

	// The file is described before it is read, so that a change in between is found at the next check.
	file := describeFile(p.cfg.CAFile)
	var profile *commonv1.Profile
	var err error
	if file != former {
		profile, err = p.read()
	}

	p.mu.Lock()
	defer p.mu.Unlock()
	p.checking = false
	if err != nil {
		if p.failure != err.Error() {
			p.failure = err.Error()
			p.logger.Error("the certificate authorities that agents are told cannot be read; those from before go on",
				slog.String("file", p.cfg.CAFile), obs.Err(err))
		}
		return p.profile
	}
	p.file, p.failure = file, ""
	if profile != nil && profile.GetFingerprint() != p.profile.GetFingerprint() {
		p.logger.Info("the profile that agents are told has changed", slog.String("fingerprint", profile.GetFingerprint()))
		p.profile = profile
	}
	return p.profile
}

// read reads the file and returns the profile. Its fingerprint covers all its fields, so that an agent and its control
// plane notice when they have different profiles.
func (p *profiles) read() (*commonv1.Profile, error) {
	bundle, err := pki.LoadBundle(p.cfg.CAFile)
	if err != nil {
		return nil, fmt.Errorf("load what agents trust: %w", err)
	}
	out := &commonv1.Profile{
		Name: p.cfg.Name, ApiUrl: p.cfg.APIURL, RecoveryUrl: p.cfg.RecoveryURL, TerminalUrl: p.cfg.TerminalURL,
		CaBundlePem: bundle.PEM(), RecoveryCaBundlePem: bundle.PEM(),
	}
	sum := sha256.New()
	for _, part := range []string{
		out.GetName(), out.GetApiUrl(), out.GetRecoveryUrl(), out.GetTerminalUrl(), string(out.GetCaBundlePem()),
		string(out.GetRecoveryCaBundlePem()),
	} {
		fmt.Fprintf(sum, "%d:%s", len(part), part)
	}
	out.Fingerprint = hex.EncodeToString(sum.Sum(nil))
	return out, nil
}

// describeFile returns a description of a file that differs after the file has changed.
func describeFile(path string) string {
	info, err := os.Stat(path)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d %s %d", info.Size(), info.Mode(), info.ModTime().UnixNano())
}
