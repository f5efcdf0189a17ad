package plans

import (
	"errors"
	"io"
	"strings"
	"testing"
)

// TestASerialOfAnyLengthIsCopied: a serial is written without leading zeros, so that one of 16 is shorter.
func TestASerialOfAnyLengthIsCopied(t *testing.T) {
	t.Parallel()
	for _, serial := range []string{
		"0a3f9c2d4e5b60718293a4b5c6d7e8f9", "a3f9c2d4e5b60718293a4b5c6d7e8f9",
		"f9c2d4e5b60718293a4b5c6d7e8f9",
	} {
		tmpl := &Template{
			tables: []table{
				{
					name: "recovery.serial", columns: []string{"serial", "node_id"},
					rows: []string{serial + "\t01a207bb-9f10-770a-9786-71238ad18505\n"},
				},
				{name: "lifecycle.tenant", columns: []string{"id"}, rows: []string{"01a207bb-9f10-770a-9786-71238ad18506\n"}},
				{
					name: "lifecycle.workspace", columns: []string{"id", "name"},
					rows: []string{"01a207bb-9f10-770a-9786-71238ad18507\t" + workspaceName + "\n"},
				},
			},
			levels: map[string]level{tenantName: ofTenant, nodeName: ofNode, workspaceName: ofWorkspace},
		}
		if err := tmpl.classify(); err != nil {
			t.Fatal(err)
		}
		if at := tmpl.levels[serial]; at != ofNode {
			t.Errorf("the serial %s is of level %d, not of the machine", serial, at)
		}
	}
}

// TestCopiesComeInLargePieces: a row that came alone would be a message to the server of its own.
func TestCopiesComeInLargePieces(t *testing.T) {
	t.Parallel()
	const rows = 1000
	const id = "01a207bb-9f10-770a-9786-71238ad18507"
	row := table{
		name: "lifecycle.workspace", columns: []string{"id", "name"}, rows: []string{id + "\t" + workspaceName + "\n"},
	}
	tmpl := &Template{tables: []table{row}, levels: map[string]level{id: ofWorkspace, workspaceName: ofWorkspace}}
	read := tmpl.copies(row, Size{Nodes: 1, Workspaces: rows})
	buffer, total, reads := make([]byte, 64<<10), 0, 0
	for {
		n, err := read.Read(buffer)
		total += n
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		reads++
	}
	if want := rows * len(row.rows[0]); total != want {
		t.Errorf("%d bytes were read, not %d", total, want)
	}
	if reads > 2 {
		t.Errorf("%d bytes came in %d pieces", total, reads)
	}
}

// TestCopiesHaveIDsAndNamesOfTheirOwn: a copy has the same in the place of one id or name wherever it stands, which no
// other copy has, and the first has the template's.
func TestCopiesHaveIDsAndNamesOfTheirOwn(t *testing.T) {
	t.Parallel()
	const id = "01a207bb-9f10-770a-9786-71238ad18507"
	digest := `\\x` + strings.Repeat("ab", 32)
	for _, tt := range []struct {
		token      string
		n, earlier int
		want       string
	}{
		{token: id, n: 0, want: id},
		{token: id, n: 7, earlier: 60, want: "01a207ba-b4b0-73c5-9a21-764c8510bbf8"},
		{token: workspaceName, n: 42, want: "w-00000042"},
		{token: digest, n: 3, want: `\\xb19d7fac29b5644716d13a6c3a3c953acb51a11639cae7ae4cd891e913331d1b`},
		{token: "a3f9c2d4e5b60718293a4b5c6d7e8f9", n: 5, want: "72b2b2cd1faecc303baf08017dfedc3"},
	} {
		if got := newNaming(piece{token: tt.token}, ofWorkspace).of(tt.n, tt.earlier); got != tt.want {
			t.Errorf("copy %d of %s has %s, not %s", tt.n, tt.token, got, tt.want)
		}
	}
}

// TestACopyAllocatesLittle: a fleet has millions of rows.
func TestACopyAllocatesLittle(t *testing.T) {
	const rows = 1000
	const id, tenant = "01a207bb-9f10-770a-9786-71238ad18507", "01a207bb-9f10-770a-9786-71238ad18508"
	row := table{
		name: "lifecycle.workspace", columns: []string{"id", "tenant_id", "name"},
		rows: []string{id + "\t" + tenant + "\t" + workspaceName + "\n"},
	}
	tmpl := &Template{
		tables: []table{row}, levels: map[string]level{id: ofWorkspace, workspaceName: ofWorkspace, tenant: ofTenant},
	}
	got := testing.AllocsPerRun(1, func() {
		if _, err := io.Copy(io.Discard, tmpl.copies(row, Size{Nodes: 1, Workspaces: rows})); err != nil {
			t.Error(err)
		}
	}) / rows
	if got > 10 {
		t.Errorf("a copy takes %.0f allocations", got)
	}
}
