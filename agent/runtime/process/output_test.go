package process_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/gpuaas/mesh/agent/runtime/process"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/showable"
	"github.com/gpuaas/mesh/internal/testkit"
)

const secret = "OUTPUT-CANARY-91be"

func (g *rig) read(req process.OutputRequest) *nodev1.WorkloadOutput {
	g.t.Helper()
	req.WorkspaceID = workspaceA
	out, err := g.Output(g.ctx, req)
	if err != nil {
		g.t.Fatalf("read output: %v", err)
	}
	return out
}

// TestLastOutputOfACrashLoop: the restarts of a workload that exits with an error again and again are counted, and the
// end of its last run's output can be read, clean and without the values of its environment.
func TestLastOutputOfACrashLoop(t *testing.T) {
	eachHost(t, func(t *testing.T, g *rig) {
		t.Helper()
		w := sh(
			"loop", `printf 'key=%s\n\033[31mred\033[0m\nstatus of %s\n' "$KEY" "$GPUAAS_WORKLOAD"
				printf 'colour %.5s\033[m%s\n' "$KEY" "${KEY#?????}"; exit 3`,
		)
		w.Env = map[string]string{"KEY": secret}
		g.deploy(w)
		st := g.until("loop", "restarted three times", func(st *nodev1.WorkloadStatus) bool { return st.GetRestarts() >= 3 })
		if st.GetExitCode() != 3 {
			t.Errorf("the exit code of the last run is %d while the next one begins", st.GetExitCode())
		}
		if got, want := g.LastOutput(g.ctx, workspaceA, "loop"), "key=****\nred\nstatus of loop\ncolour ****"; got != want {
			t.Errorf("last output %q, want %q", got, want)
		}
		if strings.Contains(st.GetLastOutput(), "key") {
			t.Error("a status that did not ask for it carries output")
		}
	})
}

func TestLastOutputOfWhatIsNeverRestarted(t *testing.T) {
	g := newRig(t, host(t), false)
	w := sh("once", `i=0; while [ $i -lt 900 ]; do printf '\342\202\254'; i=$((i+1)); done; exit 7`) // 2700 bytes of €
	w.RestartPolicy = nodev1.RestartPolicy_RESTART_POLICY_NEVER
	g.deploy(w)
	st := g.phase("once", nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED)
	if st.GetRestarts() != 0 || st.GetExitCode() != 7 {
		t.Errorf("status %v", st)
	}
	got := g.LastOutput(g.ctx, workspaceA, "once")
	if len(got) > showable.MaxTail || len(got) < showable.MaxTail-3 || !utf8.ValidString(got) ||
		strings.Trim(got, "€") != "" {
		t.Errorf("%d bytes, valid %t: %.20q", len(got), utf8.ValidString(got), got)
	}
	out := g.read(process.OutputRequest{Name: "once", Epoch: 1})
	if !out.GetEnded() || out.GetExitCode() != 7 || len(out.GetData()) != 2700 || out.GetMore() ||
		out.GetPhase() != st.GetPhase() {
		t.Errorf("output %d bytes, ended %t with %d, more %t, %v", len(out.GetData()), out.GetEnded(), out.GetExitCode(),
			out.GetMore(), out.GetPhase())
	}
}

// TestOutputInPieces reads the output of a workload in small pieces whose borders lie inside of secrets and characters:
// together they are the output, each byte once, with the secrets masked.
func TestOutputInPieces(t *testing.T) {
	g := newRig(t, host(t), false)
	const lines = 40
	w := sh(
		"pieces", fmt.Sprintf(
			`i=0; while [ $i -lt %d ]; do echo "$i: €$KEY-ü"; i=$((i+1)); done; echo end; exec sleep 600`, lines,
		),
	)
	w.Env = map[string]string{"KEY": secret}
	g.deploy(w)
	g.output("pieces", "end\n")
	var want strings.Builder
	for i := range lines {
		fmt.Fprintf(&want, "%d: €****-ü\n", i)
	}
	want.WriteString("end\n")
	for _, most := range []int{5, 7, 13, 64, 1000} {
		var got strings.Builder
		cursor := &nodev1.OutputCursor{Run: g.read(process.OutputRequest{Name: "pieces"}).GetRun()}
		for range 10000 {
			out := g.read(process.OutputRequest{Name: "pieces", From: cursor, Max: most})
			if out.GetDroppedBytes() != 0 || out.GetRestarted() || out.GetOffset() != cursor.GetOffset() ||
				len(out.GetData()) > most {
				t.Fatalf("piece of %d: %v", most, out)
			}
			if !utf8.Valid(out.GetData()) {
				t.Fatalf("piece of %d is cut in a character: %q", most, out.GetData())
			}
			got.Write(out.GetData())
			if cursor = out.GetNext(); !out.GetMore() {
				break
			}
		}
		if got.String() != want.String() {
			t.Errorf("pieces of %d: %q", most, got.String())
		}
	}
	// An offset inside of a value shows no part of it either.
	for offset := range int64(40) {
		out := g.read(process.OutputRequest{
			Name: "pieces",
			From: &nodev1.OutputCursor{Run: g.read(process.OutputRequest{Name: "pieces"}).GetRun(), Offset: offset}, Max: 30,
		})
		if strings.Contains(string(out.GetData()), "CANARY") || strings.Contains(string(out.GetData()), "91be") {
			t.Errorf("from offset %d: %q", offset, out.GetData())
		}
	}
}

// TestAValueThatIsWrittenInTwoGoesIsHidden: the first half of a secret is held back until the rest is there.
func TestAValueThatIsWrittenInTwoGoesIsHidden(t *testing.T) {
	g := newRig(t, host(t), false)
	half := len(secret) / 2
	w := sh("halves", fmt.Sprintf(`printf 'a:%s'; while [ ! -e go ]; do sleep 0.02; done; printf '%s:b\n'; exec sleep 600`,
		secret[:half], secret[half:]))
	w.Env = map[string]string{"KEY": secret}
	g.deploy(w)
	g.output("halves", secret[:half])
	first := g.read(process.OutputRequest{Name: "halves"})
	if string(first.GetData()) != "a:" {
		t.Errorf("before the second half: %q", first.GetData())
	}
	g.touch("halves", "go")
	g.output("halves", ":b")
	second := g.read(process.OutputRequest{Name: "halves", From: first.GetNext()})
	if string(second.GetData()) != "****:b\n" {
		t.Errorf("after it: %q", second.GetData())
	}
}

// TestOutputOfThePreviousRun: a restart keeps the output of the previous run, bounded; a caller that follows gets the
// end of that run and then the new one.
func TestOutputOfThePreviousRun(t *testing.T) {
	g := newRig(t, host(t), false)
	w := sh(
		"turns", `n=$(cat n 2>/dev/null || echo 0); n=$((n+1)); echo $n > n; echo "run $n begins"
			while [ ! -e "go$n" ]; do sleep 0.02; done; echo "run $n ends"; exit 1`,
	)
	g.deploy(w)
	g.output("turns", "run 1 begins")
	if _, err := g.Output(g.ctx, process.OutputRequest{
		WorkspaceID: workspaceA, Name: "turns",
		Previous: true,
	}); !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
		t.Errorf("the run before the first: %v", err)
	}
	first := g.read(process.OutputRequest{Name: "turns"})
	g.touch("turns", "go1")
	g.output("turns", "run 2 begins")
	before := g.read(process.OutputRequest{Name: "turns", Previous: true})
	if string(before.GetData()) != "run 1 begins\nrun 1 ends\n" || !before.GetEnded() || before.GetExitCode() != 1 ||
		before.GetRun() != first.GetRun() {
		t.Errorf("the previous run: %v", before)
	}
	rest := g.read(process.OutputRequest{Name: "turns", From: first.GetNext()})
	if string(rest.GetData()) != "run 1 ends\n" || rest.GetRestarted() || !rest.GetMore() {
		t.Errorf("the rest of the run that was followed: %v", rest)
	}
	next := g.read(process.OutputRequest{Name: "turns", From: rest.GetNext()})
	if string(next.GetData()) != "run 2 begins\n" || next.GetRun() == first.GetRun() || next.GetRestarts() != 1 {
		t.Errorf("the next run: %v", next)
	}
	g.touch("turns", "go2")
	g.output("turns", "run 3 begins")
	lost := g.read(process.OutputRequest{Name: "turns", From: first.GetNext()})
	if !lost.GetRestarted() || string(lost.GetData()) != "run 3 begins\n" {
		t.Errorf("a cursor of a run that is gone: %v", lost)
	}
	// A deploy of another spec keeps it as well, and the values that were secret then are still masked.
	again := sh("turns", `echo anew; exec sleep 600`)
	again.Env = map[string]string{"OTHER": "another-value"}
	g.deploy(again)
	g.output("turns", "anew")
	if got := g.read(process.OutputRequest{Name: "turns", Previous: true}); string(got.GetData()) != "run 3 begins\n" {
		t.Errorf("the run before the deploy: %v", got)
	}
}

func TestSecretsOfAFormerDeployStayHidden(t *testing.T) {
	g := newRig(t, host(t), false)
	w := sh("rolled", `echo "key $KEY"; exec sleep 600`)
	w.Env = map[string]string{"KEY": secret}
	g.deploy(w)
	g.output("rolled", secret)
	w = sh("rolled", `echo "key $KEY"; exec sleep 600`)
	w.Env = map[string]string{"KEY": "quite-another", "URL": "postgresql://role:pass-of-url@host/db"}
	w.Command[2] = `echo "key $KEY"; echo pass-of-url at host; exec sleep 600`
	g.deploy(w)
	g.output("rolled", "at host")
	for previous, want := range map[bool]string{true: "key ****\n", false: "key ****\n**** at host\n"} {
		if got := g.read(process.OutputRequest{Name: "rolled", Previous: previous}); string(got.GetData()) != want {
			t.Errorf("previous %t: %q", previous, got.GetData())
		}
	}
}

// TestOutputThatWasCut: bytes that are not kept are counted, and no byte comes twice.
func TestOutputThatWasCut(t *testing.T) {
	const limit = 64 << 10 // of a file, in newRuntime
	g := newRig(t, host(t), false)
	g.deploy(sh("loud", `i=0; while [ $i -lt 3000 ]; do
			echo "line $i 0123456789012345678901234567890123456789012345678901234567890123456789"; i=$((i+1)); done
		: > written; while [ ! -e go ]; do sleep 0.02; done; echo done; exec sleep 600`))
	// However fast lines come, and however often the file is cut meanwhile: once all are written, it is cut a last time if
	// it is too large.
	testkit.Eventually(t, testkit.Patience, func() error {
		if _, err := os.Stat(filepath.Join(g.dir, "open", "work", workspaceA, "loud", "written")); err != nil {
			return err
		}
		if n := len(g.file("loud", "output.log")); n > limit {
			return fmt.Errorf("the file has %d bytes still", n)
		}
		return nil
	})
	g.touch("loud", "go")
	var end int64
	testkit.Eventually(t, testkit.Patience, func() error {
		out := g.read(process.OutputRequest{Name: "loud"})
		end = out.GetNext().GetOffset()
		if !strings.HasSuffix(string(out.GetData()), "done\n") {
			return fmt.Errorf("not done: %.100q", out.GetData())
		}
		return nil
	})
	var dropped, got int64
	cursor := &nodev1.OutputCursor{Run: g.read(process.OutputRequest{Name: "loud"}).GetRun()}
	var text strings.Builder
	for more := true; more; {
		out := g.read(process.OutputRequest{Name: "loud", From: cursor})
		dropped, got = dropped+out.GetDroppedBytes(), got+int64(len(out.GetData()))
		if cursor.GetOffset()+out.GetDroppedBytes() != out.GetOffset() {
			t.Fatalf("from %d: %d dropped, but it begins at %d", cursor.GetOffset(), out.GetDroppedBytes(), out.GetOffset())
		}
		text.Write(out.GetData())
		cursor, more = out.GetNext(), out.GetMore()
	}
	if dropped == 0 || got < limit || dropped+got != end || cursor.GetOffset() != end {
		t.Errorf("%d dropped and %d read up to %d, want %d", dropped, got, cursor.GetOffset(), end)
	}
	last := -1
	for _, line := range regexp.MustCompile(`(?m)^line (\d+) \d{70}$`).FindAllStringSubmatch(text.String(), -1) {
		number, err := strconv.Atoi(line[1])
		if err != nil || number <= last {
			t.Fatalf("line %s after line %d: %v", line[1], last, err)
		}
		last = number
	}
	if last < 0 || strings.Count(text.String(), "done\n") != 1 || !strings.HasSuffix(text.String(), "done\n") {
		t.Errorf("it ends with line %d: %q", last, text.String()[max(0, text.Len()-100):])
	}
}

func TestOutputRefusals(t *testing.T) {
	g := newRig(t, host(t), false)
	g.deploy(sh("there", "exec sleep 600"))
	for name, req := range map[string]process.OutputRequest{
		"another workload": {WorkspaceID: workspaceA, Name: "other"},
		"another epoch":    {WorkspaceID: workspaceA, Name: "there", Epoch: 2},
		"no run before":    {WorkspaceID: workspaceA, Name: "there", Previous: true},
	} {
		if _, err := g.Output(g.ctx, req); !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := g.Output(g.ctx, process.OutputRequest{WorkspaceID: workspaceA, Name: "../../etc"}); !fault.Has(err,
		commonv1.Reason_REASON_INVALID_ARGUMENT) {
		t.Errorf("a name that climbs: %v", err)
	}
}
