package config_test

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/mesh/internal/config"
)

type database struct {
	URL      string            `yaml:"url"`
	PoolSize int               `yaml:"pool_size"`
	Password config.SecretFile `yaml:"password_file"`
}

func (d database) Validate() error {
	var errs []error
	if d.URL == "" {
		errs = append(errs, errors.New("url is needed"))
	}
	if d.PoolSize < 1 || d.PoolSize > 100 {
		errs = append(errs, fmt.Errorf("pool_size %d: want 1 to 100", d.PoolSize))
	}
	return errors.Join(errs...)
}

type plan struct {
	Name    string        `yaml:"name"`
	GPUs    int           `yaml:"gpus"`
	Timeout time.Duration `yaml:"timeout"`
}

type SampleBase struct {
	Shared string `yaml:"shared"`
}

type sample struct {
	Listen   netip.AddrPort `yaml:"listen"`
	Database database       `yaml:"database"`
	Sweep    time.Duration  `yaml:"sweep"`
	Regions  []string       `yaml:"regions"`
	Plans    []plan         `yaml:"plans"`
	Labels   map[string]string
	Debug    bool
	Ratio    float64
	Era      uint64
	Runtime  *int `yaml:"-"`
}

func (s *sample) Validate() error {
	if s.Sweep <= 0 {
		return errors.New("sweep must be positive")
	}
	return nil
}

func defaults() sample {
	return sample{
		Listen: netip.MustParseAddrPort("127.0.0.1:0"), Database: database{URL: "postgres://localhost", PoolSize: 8},
		Sweep: time.Minute, Regions: []string{"local"}, Ratio: 0.2,
	}
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "lifecycle.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestPrecedence(t *testing.T) {
	file := write(t, "sweep: 10s\nratio: 0.5\ndatabase:\n  pool_size: 20\n  url: postgres://file\nregions: [a, "+
		"b]\nplans:\n  - {name: small, gpus: 1, timeout: 5s}\nlabels: {x: y}\nera: 7\n")
	got, err := config.Load(defaults(), config.LoadOptions{
		File: file, EnvPrefix: "GPUAAS_LIFECYCLE_",
		Environ: []string{
			"GPUAAS_LIFECYCLE_DATABASE_POOL_SIZE=30", "GPUAAS_LIFECYCLE_SWEEP=20s", "GPUAAS_LIFECYCLE_DEBUG=true",
			"GPUAAS_LIFECYCLE_LISTEN=127.0.0.1:7", "GPUAAS_LIFECYCLE_SERVICE_HOST=10.0.0.1",
			"GPUAAS_LIFECYCLE_PORT_8443_TCP_ADDR=10.0.0.1", "GPUAAS_OTHER=x",
			"PATH=/bin",
		},
		Overrides: map[string]string{"sweep": "30s", "regions": "c, d"},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := defaults()
	want.Sweep, want.Ratio, want.Debug, want.Era = 30*time.Second, 0.5, true, 7
	want.Database.PoolSize, want.Database.URL = 30, "postgres://file"
	want.Regions, want.Labels = []string{"c", "d"}, map[string]string{"x": "y"}
	want.Plans = []plan{{Name: "small", GPUs: 1, Timeout: 5 * time.Second}}
	want.Listen = netip.MustParseAddrPort("127.0.0.1:7")
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
}

func TestDefaultsAloneLoad(t *testing.T) {
	got, err := config.Load(defaults(), config.LoadOptions{File: write(t, "# nothing\n")})
	if err != nil || got.Sweep != time.Minute {
		t.Errorf("Load() = %+v, %v", got, err)
	}
}

func TestAllProblemsAtOnce(t *testing.T) {
	file := write(t, `swep: 10s
ratio: high
sweep: 10
database:
  pool_size: 0
  url: ""
  pool: 3
plans:
  - {name: small, gpus: one, colour: red}
regions: local
listen: nowhere
debug:
`)
	_, err := config.Load(defaults(), config.LoadOptions{
		File: file, EnvPrefix: "GPUAAS_LIFECYCLE_", Environ: []string{"GPUAAS_LIFECYCLE_ERA=-1", "GPUAAS_LIFECYCLE_RATIOS=1"},
		Overrides: map[string]string{"nonsense.key": "1", "era": "x"},
	})
	if err == nil {
		t.Fatal("want an error")
	}
	text := err.Error()
	for _, want := range []string{
		"lifecycle.yaml:1: swep: unknown key: did you mean sweep?",
		"lifecycle.yaml:2: ratio: ", "lifecycle.yaml:3: sweep: ", "a duration needs its unit",
		"lifecycle.yaml:7: database.pool: unknown key", "lifecycle.yaml:8: plans: ", "colour",
		"lifecycle.yaml:10: regions: ", "lifecycle.yaml:11: listen: ", "lifecycle.yaml:12: debug: has no value",
		"database: url is needed", "database: pool_size 0: want 1 to 100",
		"GPUAAS_LIFECYCLE_ERA: era: ", "GPUAAS_LIFECYCLE_RATIOS: unknown key: did you mean GPUAAS_LIFECYCLE_RATIO?",
		"flag: nonsense.key: unknown key", "flag: era: ",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("missing %q in:\n%s", want, text)
		}
	}
	// A value that could not be read must not be reported twice, by the rule about the zero value.
	if strings.Contains(text, "sweep must be positive") {
		t.Errorf("false report in:\n%s", text)
	}
	if n := len(config.Problems(err)); n < 15 {
		t.Errorf("%d problems", n)
	}
}

func TestCheck(t *testing.T) {
	if problems := config.Check(defaults(), write(t, "sweep: 5s\n")); len(problems) != 0 {
		t.Errorf("problems %v", problems)
	}
	for name, text := range map[string]string{
		"not yaml": "a: [", "list": "- a\n", "twice": "sweep: 1s\nsweep: 2s\n",
		"section as value": "database: 7\n", "negative": "sweep: -1s\n",
	} {
		if problems := config.Check(defaults(), write(t, text)); len(problems) == 0 {
			t.Errorf("%s: no problem", name)
		}
	}
	if problems := config.Check(defaults(), filepath.Join(t.TempDir(), "absent.yaml")); len(problems) != 1 {
		t.Errorf("absent file: %v", problems)
	}
}

// TestValuesAreReadAlikeInEachLayer checks what a value may be, and that a refusal says what is wanted.
func TestValuesAreReadAlikeInEachLayer(t *testing.T) {
	file := func(text string) config.LoadOptions { return config.LoadOptions{File: write(t, text)} }
	flag := func(key, text string) config.LoadOptions {
		return config.LoadOptions{Overrides: map[string]string{key: text}}
	}
	env := func(pair string) config.LoadOptions {
		return config.LoadOptions{EnvPrefix: "GPUAAS_X_", Environ: []string{"GPUAAS_X_" + pair}}
	}
	for name, tt := range map[string]struct {
		from config.LoadOptions
		want string
	}{
		"fraction":              {file("database: {pool_size: 1.5}\n"), "database.pool_size: `1.5`: want a whole number"},
		"fraction in a list":    {file("plans:\n  - name: a\n    gpus: 1.5\n"), "plans: line 3: `1.5`: want a whole number"},
		"number of a flag":      {flag("database.pool_size", "many"), "flag: database.pool_size: `many`: want a whole"},
		"negative":              {env("ERA=-1"), "GPUAAS_X_ERA: era: `-1`: want a whole number that fits uint64"},
		"duration of a flag":    {flag("sweep", "10"), "flag: sweep: `10`: a duration needs its unit"},
		"empty":                 {env("ERA="), "GPUAAS_X_ERA: era: has no value"},
		"null":                  {file("era: null\n"), ":1: era: has no value"},
		"text for a map":        {env("LABELS=a"), "GPUAAS_X_LABELS: labels: can be given in the file only"},
		"truth value":           {flag("debug", "maybe"), "flag: debug: `maybe`: want true or false"},
		"list for text":         {file("database: {url: [a]}\n"), ":1: database.url: want text"},
		"map for a path":        {file("database:\n  password_file: {a: b}\n"), ":2: database.password_file: want text"},
		"text for a map's keys": {file("labels: 7\n"), ":1: labels: `7`: want keys and values"},
		"key twice in a list":   {file("plans:\n  - name: a\n    name: b\n"), "already defined"},
	} {
		_, err := config.Load(defaults(), tt.from)
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
	got, err := config.Load(defaults(), config.LoadOptions{
		File:      write(t, "plans:\n  - &a {name: a, gpus: 0x10, timeout: 1s}\n  - *a\ndatabase: {url: 7}\n"),
		EnvPrefix: "GPUAAS_X_", Environ: []string{"GPUAAS_X_DEBUG=1", "GPUAAS_X_REGIONS="},
	})
	if err != nil {
		t.Fatal(err)
	}
	a := plan{Name: "a", GPUs: 16, Timeout: time.Second}
	if !slices.Equal(got.Plans, []plan{a, a}) || got.Database.URL != "7" || !got.Debug || len(got.Regions) != 0 {
		t.Errorf("Load() = %+v", got)
	}
}

// TestEmbeddedConfigurationHasItsKeysAtTheTop checks a configuration that embeds another one, as each service's does.
func TestEmbeddedConfigurationHasItsKeysAtTheTop(t *testing.T) {
	type embeds struct {
		SampleBase `yaml:",inline"`

		Own string `yaml:"own"`
	}
	want := embeds{SampleBase: SampleBase{Shared: "a"}, Own: "b"}
	raw, err := config.Marshal(want)
	if err != nil || string(raw) != "shared: a\nown: b\n" {
		t.Fatalf("Marshal() = %q, %v", raw, err)
	}
	got, err := config.Load(embeds{}, config.LoadOptions{File: write(t, string(raw))})
	if err != nil || got != want {
		t.Errorf("Load() = %+v, %v", got, err)
	}
}

func TestSchemaRefusals(t *testing.T) {
	type inline struct{ Password config.Secret }
	if _, err := config.Load(inline{}, config.LoadOptions{}); err == nil ||
		!strings.Contains(err.Error(), "path of its file") {
		t.Errorf("inline secret: %v", err)
	}
	type clash struct {
		A  struct{ B string } `yaml:"a"`
		AB string             `yaml:"a_b"`
	}
	if _, err := config.Load(clash{}, config.LoadOptions{}); err == nil ||
		!strings.Contains(err.Error(), "same name in the environment") {
		t.Errorf("clash: %v", err)
	}
	if _, err := config.Load(3, config.LoadOptions{}); err == nil {
		t.Error("a number is no configuration")
	}
}

func TestMarshalRoundTrip(t *testing.T) {
	want := defaults()
	want.Plans = []plan{{Name: "small", GPUs: 1, Timeout: 90 * time.Second}}
	want.Labels = map[string]string{"a": "1"}
	raw, err := config.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := config.Load(sample{}, config.LoadOptions{File: write(t, string(raw))})
	if err != nil {
		t.Fatalf("%v in\n%s", err, raw)
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
}

func TestSecretFile(t *testing.T) {
	dir := t.TempDir()
	put := func(name, text string, mode os.FileMode) config.SecretFile {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		return config.SecretFile(path)
	}
	got, err := put("good", "s3cret\n", 0o600).Read()
	if err != nil || got.Reveal() != "s3cret" {
		t.Errorf("Read() = %v, %v", got.Reveal(), err)
	}
	if v := got.LogValue(); v.Kind() != slog.KindString || v.String() != "[redacted]" {
		t.Errorf("LogValue = %v", v)
	}
	for name, f := range map[string]config.SecretFile{
		"group": put("group", "x", 0o640), "world": put("world", "x", 0o604), "empty": put("empty", "\n", 0o600),
		"huge": put("huge", strings.Repeat("x", 65<<10), 0o600), "absent": config.SecretFile(filepath.Join(dir, "absent")),
		"directory": config.SecretFile(dir), "unset": "",
	} {
		if _, err := f.Read(); err == nil {
			t.Errorf("%s: want an error", name)
		}
	}
}

func TestProblemsOfPlainErrors(t *testing.T) {
	if config.Problems(nil) != nil || config.Problems(errors.New("x")) != nil {
		t.Error("a problem out of nothing")
	}
	p := config.Problem{Where: "w", Key: "k", Message: "m"}
	if got := config.Problems(fmt.Errorf("a: %w", errors.Join(p, errors.New("b"), p))); !slices.Equal(got,
		[]config.Problem{p, p}) {
		t.Errorf("Problems = %v", got)
	}
}
