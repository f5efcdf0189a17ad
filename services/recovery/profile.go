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

// profiles is the profile that agents are told, with the file of certificate authorities as it is now. A file that cannot
// be read is logged, and read again at the next check; what was read before goes on meanwhile. Safe for concurrent use.
type profiles struct {
	logger *slog.Logger
	cfg    Profile
	every  time.Duration // see profileEvery

	mu       sync.Mutex
	profile  *commonv1.Profile // replaced, never changed
	file     string            // describes the file that was read
	failure  string            // of the last check, which was logged; empty if it had none
	checked  time.Time
	checking bool // a caller looks at the file now
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

// current returns the profile, read anew if the file has changed. One caller at a time looks at the file; the others do not
// wait for it, on a file system that hangs.
func (p *profiles) current() *commonv1.Profile {
	p.mu.Lock()
	if p.checking || time.Since(p.checked) < p.every {
		defer p.mu.Unlock()
		return p.profile
	}
	p.checking, p.checked = true, time.Now()
	former := p.file
	p.mu.Unlock()

	// Described before it is read: a change in between is read at the next check.
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

// read reads the file. The profile is fingerprinted over all that it says, so that an agent and its control plane notice when they disagree.
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
		out.GetName(), out.GetApiUrl(), out.GetRecoveryUrl(), out.GetTerminalUrl(), string(out.GetCaBundlePem()), string(out.GetRecoveryCaBundlePem()),
	} {
		fmt.Fprintf(sum, "%d:%s", len(part), part)
	}
	out.Fingerprint = hex.EncodeToString(sum.Sum(nil))
	return out, nil
}

// describeFile describes a file so that a change of it shows.
func describeFile(path string) string {
	info, err := os.Stat(path)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d %s %d", info.Size(), info.Mode(), info.ModTime().UnixNano())
}
