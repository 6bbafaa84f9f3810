package dockerfile

import (
	"maps"
	"regexp"
	"slices"
	"strings"
)

var stageName = regexp.MustCompile(`^[a-z][a-z0-9_.-]{0,127}$`)

// rule is what an instruction may look like.
type rule struct {
	flags   []string // that it knows
	least   int      // words
	most    int      // words; zero: any number
	json    bool     // its words may be a JSON list
	usage   string   // how it is written
	ignored string   // why it can be left out
	refused string   // why there can be no such
	also    func(*Instruction) error
}

var rules = map[string]rule{
	"FROM":       {flags: []string{"platform"}, least: 1, most: 3, usage: "FROM IMAGE [AS NAME]"},
	"ARG":        {least: 1, usage: "ARG NAME[=VALUE]", also: argNames},
	"RUN":        {flags: []string{"mount", "network", "security"}, json: true, usage: "RUN COMMAND or RUN [\"program\", \"argument\"]", also: runnable},
	"COPY":       {flags: copyFlags, least: 2, json: true, usage: "COPY SOURCE... DESTINATION", also: copyable},
	"ADD":        {flags: copyFlags, least: 2, json: true, usage: "ADD SOURCE... DESTINATION", also: copyable},
	"ENV":        {least: 1, usage: "ENV NAME=VALUE", also: pairs},
	"LABEL":      {least: 1, usage: "LABEL NAME=VALUE", also: pairs},
	"WORKDIR":    {least: 1, usage: "WORKDIR PATH"},
	"USER":       {least: 1, most: 1, usage: "USER NAME[:GROUP]"},
	"ENTRYPOINT": {json: true, usage: "ENTRYPOINT [\"program\", \"argument\"]"},
	"CMD":        {json: true, usage: "CMD [\"program\", \"argument\"]"},
	"SHELL":      {least: 1, json: true, usage: "SHELL [\"/bin/sh\", \"-c\"]", also: listOnly},
	"EXPOSE":     {least: 1, usage: "EXPOSE PORT[/PROTOCOL]"},
	"MAINTAINER": {ignored: "use LABEL org.opencontainers.image.authors"},
	"STOPSIGNAL": {ignored: "a sandbox ends as a whole"},
	"HEALTHCHECK": {flags: []string{"interval", "timeout", "start-period", "start-interval", "retries"},
		ignored: "sandboxes are not checked"},
	"VOLUME":  {json: true, ignored: "mount a volume when the sandbox is made"},
	"ONBUILD": {refused: "is not supported: write what it says into the Dockerfiles that are built from this image"},
}

var copyFlags = []string{"chown", "chmod", "from", "link", "parents", "exclude", "checksum", "keep-git-dir", "unpack"}

func knownNames() []string {
	var names []string
	for name, r := range rules {
		if r.refused == "" && r.ignored == "" {
			names = append(names, name)
		}
	}
	return slices.Sorted(slices.Values(names))
}

func (r rule) check(i *Instruction) error {
	for _, name := range slices.Sorted(maps.Keys(i.Flags)) {
		if !slices.Contains(r.flags, name) {
			return i.Errorf("%s knows no --%s", i.Name, name)
		}
	}
	if r.ignored != "" {
		return nil
	}
	if i.Rest == "" || len(i.Words) < r.least && len(i.Docs) == 0 || r.most > 0 && len(i.Words) > r.most {
		return i.Errorf("write %s", r.usage)
	}
	if r.also != nil {
		return r.also(i)
	}
	return nil
}

var argForm = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*(=|$)`)

func argNames(i *Instruction) error {
	for _, w := range i.Words {
		if !argForm.MatchString(w) {
			return i.Errorf("%s is not the name of an argument", clip(w))
		}
	}
	return nil
}

// pairs wants NAME=VALUE, or the old form of one name and then its value.
func pairs(i *Instruction) error {
	if !strings.Contains(i.Words[0], "=") {
		if len(i.Words) == 1 {
			return i.Errorf("write %s NAME=VALUE", i.Name)
		}
		return nil
	}
	for _, w := range i.Words {
		if at := strings.IndexByte(w, '='); at <= 0 {
			return i.Errorf("%s: write NAME=VALUE, and quotes around a value with spaces", clip(w))
		}
	}
	return nil
}

func listOnly(i *Instruction) error {
	if !i.Exec {
		return i.Errorf("write %s as a JSON list: [\"/bin/sh\", \"-c\"]", i.Name)
	}
	return nil
}

func runnable(i *Instruction) error {
	for mount := range strings.SplitSeq(i.Flags["mount"], "\n") {
		if mount != "" && !strings.Contains(","+mount+",", ",type=cache,") {
			return i.Errorf("RUN --mount=%s: only mounts of type=cache can be left out, and others are not supported; COPY the files that are needed", clip(mount))
		}
	}
	if n := i.Flags["network"]; n != "" && n != "default" {
		return i.Errorf("RUN --network=%s is not supported", clip(n))
	}
	if i.Flags["security"] != "" {
		return i.Errorf("RUN --security is not supported")
	}
	if i.Exec && len(i.Words) == 0 {
		return i.Errorf("RUN [] runs nothing")
	}
	return nil
}

var (
	ownerForm = regexp.MustCompile(`^[A-Za-z0-9_$][A-Za-z0-9_.$}{-]{0,127}(:[A-Za-z0-9_$][A-Za-z0-9_.$}{-]{0,127})?$`)
	modeForm  = regexp.MustCompile(`^0?[0-7]{3,4}$`)
)

func copyable(i *Instruction) error {
	for _, name := range []string{"parents", "exclude", "checksum", "keep-git-dir", "unpack"} {
		if _, given := i.Flags[name]; given {
			return i.Errorf("%s --%s is not supported", i.Name, name)
		}
	}
	if o, given := i.Flags["chown"]; given && !ownerForm.MatchString(o) {
		return i.Errorf("--chown=%s: write USER or USER:GROUP", clip(o))
	}
	if m, given := i.Flags["chmod"]; given && !modeForm.MatchString(m) {
		return i.Errorf("--chmod=%s: write octal digits such as 0755", clip(m))
	}
	if i.Name == "ADD" && i.Flags["from"] != "" {
		return i.Errorf("ADD knows no --from; use COPY")
	}
	for _, w := range i.Words {
		if i.Name == "ADD" && (strings.Contains(w, "://") || strings.HasPrefix(w, "git@")) {
			return i.Errorf("ADD cannot fetch %s; use RUN with curl or git, or fetch it first and COPY it", clip(w))
		}
	}
	return nil
}
