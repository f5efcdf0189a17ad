package recovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/services/recovery/profiles"
)

// profileEvery is the least time between two checks whether the file of certificate authorities has changed.
const profileEvery = 2 * time.Second

// profileRetry is the longest time between two attempts to take a content that is not verified.
const profileRetry = time.Minute

// configureEvery is how often a replica that starts tries to reach a database that does not answer.
const configureEvery = 250 * time.Millisecond

// profileFile has the profile that this replica is configured with, with the present content of the file of
// certificate authorities. A file that cannot be read is logged, and read again at the next check; until then the
// profile keeps the content that was read before. It is safe for concurrent use.
type profileFile struct {
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
func readProfile(logger *slog.Logger, cfg Profile) (*profileFile, error) {
	p := &profileFile{logger: logger, cfg: cfg, every: profileEvery, file: describeFile(cfg.CAFile), checked: time.Now()}
	var err error
	if p.profile, err = p.read(); err != nil {
		return nil, err
	}
	return p, nil
}

// current returns the profile, read anew if the file has changed. One caller at a time checks the file; the others do
// not wait for it, since the file system may hang.
func (p *profileFile) current() *commonv1.Profile {
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
	if profile != nil {
		p.profile = profile
	}
	return p.profile
}

// read reads the file and returns the profile.
func (p *profileFile) read() (*commonv1.Profile, error) {
	bundle, err := pki.LoadBundle(p.cfg.CAFile)
	if err != nil {
		return nil, fmt.Errorf("load what agents trust: %w", err)
	}
	out := &commonv1.Profile{
		Name: p.cfg.Name, ApiUrl: p.cfg.APIURL, RecoveryUrl: p.cfg.RecoveryURL, TerminalUrl: p.cfg.TerminalURL,
		CaBundlePem: bundle.PEM(), RecoveryCaBundlePem: bundle.PEM(),
	}
	out.Fingerprint = profiles.Fingerprint(out)
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

// openProfiles reads the profiles that nodes are given, after the configured one was taken among them.
func (s *Service) openProfiles(ctx context.Context) error {
	b := s.base
	file, err := readProfile(b.Logger, s.cfg.Profile)
	if err != nil {
		return err
	}
	s.profiles, err = profiles.NewBook(profiles.Deps{
		Logger: b.Logger, Pool: b.DB, Default: s.cfg.Profile.Name, TrustDomain: b.Config.TrustDomain, Wake: b.Wake,
		Numbered: b.Numbered, Changed: &s.changed, Audit: b.Audit, Registerer: b.Registry.ForService(b.Name),
	})
	if err != nil {
		return err
	}
	b.Health.Watch("configured_profile", s.profiles.Configured)
	taken, err := s.configureProfile(ctx, file)
	if err != nil {
		return err
	}
	b.Add(
		app.Task{Name: "profiles", Run: s.profiles.Run},
		app.Task{Name: "configured-profile", Run: func(ctx context.Context) error {
			return s.followProfile(ctx, file, taken)
		}},
	)
	return nil
}

// configureProfile takes the configured profile among the profiles, and returns the fingerprint of what was taken. It
// tries again while the database does not answer, and leaves a changed one to followProfile if its endpoints are not
// verified, as while the mesh starts: the fingerprint is empty then.
func (s *Service) configureProfile(ctx context.Context, file *profileFile) (string, error) {
	for {
		now := file.current()
		taken, err := now.GetFingerprint(), s.profiles.Configure(ctx, now)
		if fault.Has(err, commonv1.Reason_REASON_PROFILE_UNVERIFIED) {
			taken, err = "", s.profiles.Refresh(ctx)
		}
		if err == nil || !pg.IsConnError(err) {
			return taken, err
		}
		s.base.Logger.WarnContext(ctx, "the configured profile is not taken at the start", obs.Err(err))
		if !app.Sleep(ctx, configureEvery) {
			return "", fmt.Errorf("take the configured profile: %w", errors.Join(err, context.Cause(ctx)))
		}
	}
}

// followProfile takes what the configured profile has become among the profiles, until ctx ends. A content that could
// not be taken is tried again at the next check, one that was not verified ever more seldom.
func (s *Service) followProfile(ctx context.Context, file *profileFile, taken string) error {
	var again retry
	return app.Every(ctx, s.base.Logger, "configured-profile", profileEvery, func(ctx context.Context) error {
		now := file.current()
		content := now.GetFingerprint()
		if content == taken || !again.due(content, time.Now()) {
			return nil
		}
		taken = ""
		err := s.profiles.Configure(ctx, now)
		switch {
		case fault.Has(err, commonv1.Reason_REASON_PROFILE_UNVERIFIED):
			again.failed(content, time.Now())
			return nil // it is logged, and shows in the health
		case err != nil:
			return err
		}
		taken, again = content, retry{}
		return nil
	})
}

// retry is when a content that was not verified is tried again: at the next check, then after twice as long each time,
// at most after profileRetry. Another content is tried at once.
type retry struct {
	content string
	pause   time.Duration
	at      time.Time
}

// due reports whether a content is to be tried.
func (r *retry) due(content string, now time.Time) bool {
	return content != r.content || !now.Before(r.at)
}

// failed notes that a content was not verified.
func (r *retry) failed(content string, now time.Time) {
	if content != r.content {
		*r = retry{content: content}
	}
	r.pause = min(max(2*r.pause, profileEvery/2), profileRetry)
	r.at = now.Add(r.pause)
}
