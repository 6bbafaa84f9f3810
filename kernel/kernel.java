import java.io.DataInputStream;
import java.io.FileDescriptor;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.lang.reflect.InvocationHandler;
import java.lang.reflect.Proxy;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.LinkedBlockingQueue;
import jdk.jshell.Diag;
import jdk.jshell.EvalException;
import jdk.jshell.JShell;
import jdk.jshell.JShellException;
import jdk.jshell.Snippet;
import jdk.jshell.SnippetEvent;
import jdk.jshell.SourceCodeAnalysis.CompletionInfo;

/**
 * The Java kernel: runs cells in one JShell and tells what they gave, over frames on descriptor 3.
 *
 * It is kernel.py's brother and speaks the same protocol. A JDK of version 11 or later runs it from its source. JShell's
 * local engine runs cells in this very process: so they write to descriptors 1 and 2, which somebody else reads, and what
 * they exit is the kernel.
 */
class Kernel {
    private static final int FRAME_REQUEST = 1;
    private static final int FRAME_EVENT = 2;
    private static final int MAX_PAYLOAD = 16 << 20;
    private static final int MAX_EVENT = 8 << 20;
    private static final int REPEAT_AFTER = 20; // milliseconds

    private static final LinkedBlockingQueue<Map<?, ?>> CELLS = new LinkedBlockingQueue<>();
    private static OutputStream socket;
    private static JShell shell;
    private static Map<String, String> environment; // null: it cannot be changed here
    private static int count = 1;

    // Under the class's lock.
    private static int waiting; // cells that have come and are not over
    private static boolean running;
    private static volatile boolean interrupted;

    public static void main(String[] args) throws Exception {
        FileDescriptor three = descriptor(3);
        socket = new FileOutputStream(three);
        System.setOut(new PrintStream(new FileOutputStream(FileDescriptor.out), true, "UTF-8"));
        System.setErr(new PrintStream(new FileOutputStream(FileDescriptor.err), true, "UTF-8"));
        environment = environment();
        System.getenv().forEach(System.getProperties()::putIfAbsent); // as a cell's own variables are, see enter
        shell = JShell.builder().executionEngine("local").build();
        for (String name : List.of("java.io", "java.math", "java.net", "java.nio.file", "java.util", "java.util.concurrent",
                "java.util.function", "java.util.regex", "java.util.stream")) {
            shell.eval("import " + name + ".*;");
        }
        listenToInterrupts();
        daemon(Kernel::insist);
        daemon(() -> read(new DataInputStream(new FileInputStream(three))));
        send(event("ready", "pid", ProcessHandle.current().pid(), "message", "java " + System.getProperty("java.version")));
        while (true) {
            run(CELLS.take());
        }
    }

    private static void daemon(Runnable task) {
        Thread thread = new Thread(task);
        thread.setDaemon(true);
        thread.start();
    }

    private static void leave(int status, String why) {
        if (why != null) {
            System.err.println("kernel: " + why);
        }
        Runtime.getRuntime().halt(status);
    }

    // --- the socket ---------------------------------------------------------------------------------------------------

    /** A descriptor by its number. A socket has no path by which it could be opened; needs java.io to be open. */
    private static FileDescriptor descriptor(int number) throws ReflectiveOperationException {
        FileDescriptor d = new FileDescriptor();
        Field field = FileDescriptor.class.getDeclaredField("fd");
        field.setAccessible(true);
        field.setInt(d, number);
        return d;
    }

    private static void read(DataInputStream in) {
        try {
            while (true) {
                int kind = in.readInt() >>> 24;
                int length = in.readInt();
                if (kind == 0 || kind > 9 || length < 0 || length > MAX_PAYLOAD) {
                    leave(76, "bad frame");
                }
                byte[] payload = in.readNBytes(length);
                if (kind == FRAME_REQUEST) {
                    come((Map<?, ?>) new Json(new String(payload, StandardCharsets.UTF_8)).value());
                }
            }
        } catch (IOException end) {
            leave(0, null); // nobody asks any more
        } catch (RuntimeException e) {
            leave(76, "bad request");
        }
    }

    private static void send(Map<String, Object> event) {
        try {
            System.out.flush();
            System.err.flush();
        } catch (RuntimeException e) {
            // of streams that the cell has put there
        }
        byte[] payload = Json.bytes(event);
        if (payload.length > MAX_EVENT) {
            payload = Json.bytes(shortened(event, payload.length));
        }
        int n = payload.length;
        byte[] frame = Arrays.copyOf(new byte[] {FRAME_EVENT, 0, 0, 0, (byte) (n >>> 24), (byte) (n >>> 16), (byte) (n >>> 8), (byte) n}, 8 + n);
        System.arraycopy(payload, 0, frame, 8, n);
        try {
            socket.write(frame);
        } catch (IOException e) {
            leave(74, null);
        }
    }

    private static Map<String, Object> event(String type, Object... more) {
        Map<String, Object> event = map(more);
        event.put("type", type);
        return event;
    }

    private static Map<String, Object> map(Object... pairs) {
        Map<String, Object> map = new LinkedHashMap<>();
        for (int i = 0; i < pairs.length; i += 2) {
            map.put((String) pairs[i], pairs[i + 1]);
        }
        return map;
    }

    private static Map<String, Object> shortened(Map<String, Object> event, int size) {
        if (event.get("type").equals("result")) {
            return result("<result left out: " + size + " bytes, over the limit of " + MAX_EVENT + " for one event>");
        }
        Map<?, ?> e = (Map<?, ?>) event.get("error");
        List<String> lines = new ArrayList<>();
        for (Object line : (List<?>) e.get("traceback")) {
            if (lines.size() < 100) {
                lines.add(clip((String) line, 2000));
            }
        }
        return event("error", "error", map("name", e.get("name"), "value", clip((String) e.get("value"), 10000), "traceback", lines));
    }

    private static String clip(String text, int length) {
        return text.length() > length ? text.substring(0, length) : text;
    }

    // --- interrupts ---------------------------------------------------------------------------------------------------

    /** By reflection: the compiler would warn of sun.misc each time this file is run. */
    private static void listenToInterrupts() throws ReflectiveOperationException {
        Class<?> signal = Class.forName("sun.misc.Signal");
        Class<?> handler = Class.forName("sun.misc.SignalHandler");
        InvocationHandler heard = (proxy, method, args) -> {
            interrupt();
            return null;
        };
        Object ours = Proxy.newProxyInstance(Kernel.class.getClassLoader(), new Class<?>[] {handler}, heard);
        signal.getMethod("handle", signal, handler).invoke(null, signal.getConstructor(String.class).newInstance("INT"), ours);
    }

    private static synchronized void come(Map<?, ?> cell) {
        waiting++;
        CELLS.add(cell);
    }

    /** An interrupt is for the cell that came before it, even if that has not begun. */
    private static synchronized void interrupt() {
        interrupted = waiting > 0;
        Kernel.class.notifyAll();
    }

    /** Stops an interrupted cell, again and again: once may come between two of its statements. */
    private static void insist() {
        synchronized (Kernel.class) { // held while it stops, so that this does not hit the next cell
            try {
                while (true) {
                    if (interrupted && running) {
                        shell.stop();
                    }
                    Kernel.class.wait(interrupted ? REPEAT_AFTER : 0);
                }
            } catch (InterruptedException end) {
                leave(70, "interrupts are not heard any more");
            }
        }
    }

    private static synchronized void begin() {
        running = true;
        Kernel.class.notifyAll();
    }

    private static synchronized boolean over() {
        boolean was = interrupted;
        waiting--;
        running = false;
        interrupted = false;
        return was;
    }

    // --- cells --------------------------------------------------------------------------------------------------------

    private static void run(Map<?, ?> request) {
        long before = cpuMillis();
        boolean silent = Boolean.TRUE.equals(request.get("silent"));
        Runnable undo = enter(request);
        begin();
        send(event("started", "count", count));
        String outcome;
        try {
            outcome = evaluate(String.valueOf(request.get("code")), silent) ? "ok" : "error";
        } catch (IllegalStateException e) { // JShell has closed itself, and cannot be opened again with what it held
            leave(70, String.valueOf(e.getMessage()));
            return;
        }
        undo.run();
        if (over()) {
            outcome = "interrupted";
            tellError("KeyboardInterrupt", "the cell was interrupted", List.of("KeyboardInterrupt: the cell was interrupted"));
        }
        if (!silent) {
            count++;
        }
        send(event("end", "end", map("outcome", outcome, "usage", map("cpu_ms", cpuMillis() - before, "peak_bytes", peakBytes()))));
    }

    /** Runs the statements of a cell one after the other and shows what the last one is; false: it failed. */
    private static boolean evaluate(String rest, boolean silent) {
        String value = null;
        while (!rest.isBlank() && !interrupted) {
            CompletionInfo next = shell.sourceCodeAnalysis().analyzeCompletion(rest);
            String source = next.completeness().isComplete() ? next.source() : rest;
            rest = next.completeness().isComplete() ? next.remaining() : "";
            for (SnippetEvent e : shell.eval(source)) {
                if (e.causeSnippet() != null) {
                    continue; // something of before that changed with it
                }
                if (!interrupted && failed(e, source)) {
                    return false;
                }
                value = expression(e.snippet()) ? e.value() : null;
            }
        }
        if (value != null && !value.isEmpty() && !silent && !interrupted) {
            send(result(value));
        }
        return true;
    }

    private static Map<String, Object> result(String text) {
        return event("result", "result", map("data", map("text/plain", text), "main", true));
    }

    private static boolean expression(Snippet s) {
        return s.kind() == Snippet.Kind.EXPRESSION || s.subKind() == Snippet.SubKind.TEMP_VAR_EXPRESSION_SUBKIND;
    }

    private static boolean failed(SnippetEvent e, String source) {
        if (e.status() == Snippet.Status.REJECTED) {
            List<String> messages = new ArrayList<>();
            List<String> lines = new ArrayList<>();
            shell.diagnostics(e.snippet()).filter(Diag::isError).forEach(d -> {
                messages.add(d.getMessage(Locale.ROOT));
                lines.add("error: " + d.getMessage(Locale.ROOT));
                lines.addAll(pointedAt(source, (int) d.getPosition()));
            });
            tellError("CompilationException", String.join("\n", messages).strip(), lines);
            return true;
        }
        if (e.exception() == null) {
            return false;
        }
        // The name is the one that programs know from Jupyter's kernel of Java; what was thrown is in the text.
        String text = textOf(e.exception());
        tellError(e.exception().getClass().getSimpleName(), text, stackOf(e.exception(), text));
        return true;
    }

    /** The line of a position, and where in it. */
    private static List<String> pointedAt(String source, int at) {
        if (at < 0 || at > source.length()) {
            return List.of();
        }
        int begin = source.lastIndexOf('\n', at - 1) + 1;
        int end = source.indexOf('\n', at);
        return List.of("  " + source.substring(begin, end < 0 ? source.length() : end), "  " + " ".repeat(at - begin) + "^");
    }

    private static String textOf(Throwable e) {
        String text = e.getMessage();
        if (e instanceof EvalException) {
            String thrown = ((EvalException) e).getExceptionClassName();
            text = text == null ? thrown : thrown + ": " + text;
        }
        return text == null ? "" : text;
    }

    private static List<String> stackOf(JShellException e, String text) {
        List<String> lines = new ArrayList<>(List.of(text));
        for (StackTraceElement at : e.getStackTrace()) {
            String of = at.getClassName().isEmpty() ? at.getMethodName() : at.getClassName() + "." + at.getMethodName();
            String file = at.getFileName() == null ? "Unknown Source" : at.getFileName();
            lines.add("    at " + of + "(" + file + (at.getLineNumber() < 0 ? "" : ":" + at.getLineNumber()) + ")");
        }
        if (e.getCause() instanceof JShellException && lines.size() < 1000) {
            JShellException cause = (JShellException) e.getCause();
            lines.addAll(stackOf(cause, "Caused by: " + textOf(cause)));
        }
        return lines;
    }

    private static void tellError(String name, String value, List<String> traceback) {
        send(event("error", "error", map("name", name, "value", value, "traceback", traceback)));
    }

    // --- the process --------------------------------------------------------------------------------------------------

    /** What System.getenv and ProcessBuilder.environment see, to be changed; needs java.lang and java.util to be open. */
    @SuppressWarnings("unchecked")
    private static Map<String, String> environment() {
        try {
            Field field = Class.forName("java.lang.ProcessEnvironment").getDeclaredField("theUnmodifiableEnvironment");
            field.setAccessible(true);
            Object view = field.get(null);
            Field inner = view.getClass().getDeclaredField("m");
            inner.setAccessible(true);
            return (Map<String, String>) inner.get(view);
        } catch (ReflectiveOperationException | RuntimeException e) {
            return null; // a Java that has it otherwise: cells have properties still
        }
    }

    /** Enter a cell's environment; what leaves it. Its variables are properties, too, which other kernels of Java make of them. */
    private static Runnable enter(Map<?, ?> request) {
        Map<String, String> wanted = new HashMap<>();
        if (request.get("env") instanceof Map) {
            ((Map<?, ?>) request.get("env")).forEach((name, value) -> wanted.put((String) name, (String) value));
        }
        Map<String, String> variables = new HashMap<>();
        Map<String, String> properties = new HashMap<>();
        wanted.keySet().removeIf(name -> name.isEmpty() || name.contains("=") || (name + wanted.get(name)).indexOf(0) >= 0); // no process can have them
        wanted.forEach((name, value) -> {
            variables.put(name, System.getenv(name));
            properties.put(name, System.getProperty(name));
            change(name, value);
            System.setProperty(name, value);
        });
        String cwd = (String) request.get("cwd");
        if (cwd != null && !cwd.isEmpty() && cwd.indexOf(0) < 0 && !Path.of(cwd).equals(Path.of("").toAbsolutePath())) {
            System.err.println("kernel: Java cannot leave the directory it was started in, " + Path.of("").toAbsolutePath());
        }
        return () -> {
            variables.forEach(Kernel::change);
            properties.forEach((name, value) -> {
                if (value == null) {
                    System.clearProperty(name);
                } else {
                    System.setProperty(name, value);
                }
            });
        };
    }

    private static void change(String name, String value) {
        if (environment == null) {
            return;
        }
        if (value == null) {
            environment.remove(name);
        } else {
            environment.put(name, value);
        }
    }

    private static long cpuMillis() {
        try {
            String stat = Files.readString(Path.of("/proc/self/stat"));
            String[] words = stat.substring(stat.lastIndexOf(')') + 2).split(" ");
            return 10 * (Long.parseLong(words[11]) + Long.parseLong(words[12])); // ticks, a hundred of them in a second
        } catch (IOException | RuntimeException e) {
            return 0;
        }
    }

    private static long peakBytes() {
        try {
            for (String line : Files.readAllLines(Path.of("/proc/self/status"))) {
                if (line.startsWith("VmHWM:")) {
                    return Long.parseLong(line.replaceAll("[^0-9]", "")) << 10;
                }
            }
        } catch (IOException | RuntimeException e) {
            // it is not told, then
        }
        return 0;
    }

    // --- JSON ---------------------------------------------------------------------------------------------------------

    /** As much of JSON as requests and events need: Java has none. */
    private static class Json {
        private final String text;
        private int at;

        Json(String text) {
            this.text = text;
        }

        Object value() {
            switch (peek()) {
                case '{':
                    return object();
                case '"':
                    return string();
                case '[':
                    return array();
                default:
                    return word();
            }
        }

        private char peek() {
            while (text.charAt(at) <= ' ') {
                at++;
            }
            return text.charAt(at);
        }

        /** Whether something else follows in an object or array; passes what stands in between. */
        private boolean more(char end) {
            char c = peek();
            if (c == ',' || c == end) {
                at++;
            }
            return c != end;
        }

        private Map<String, Object> object() {
            Map<String, Object> map = new HashMap<>();
            at++;
            while (more('}')) {
                peek();
                String name = string();
                peek();
                at++; // the colon
                map.put(name, value());
            }
            return map;
        }

        private List<Object> array() {
            List<Object> list = new ArrayList<>();
            at++;
            while (more(']')) {
                list.add(value());
            }
            return list;
        }

        private String string() {
            StringBuilder out = new StringBuilder();
            for (at++; text.charAt(at) != '"'; at++) {
                char c = text.charAt(at);
                if (c == '\\') {
                    c = text.charAt(++at);
                    int known = "bfnrt".indexOf(c);
                    if (c == 'u') {
                        c = (char) Integer.parseInt(text.substring(at + 1, at + 5), 16);
                        at += 4;
                    } else if (known >= 0) {
                        c = "\b\f\n\r\t".charAt(known);
                    }
                }
                out.append(c);
            }
            at++;
            return out.toString();
        }

        /** A number stays its text: nothing here counts with one. */
        private Object word() {
            int begin = at;
            while (at < text.length() && ",]} \t\r\n".indexOf(text.charAt(at)) < 0) {
                at++;
            }
            String word = text.substring(begin, at);
            switch (word) {
                case "true":
                    return true;
                case "false":
                    return false;
                case "null":
                    return null;
                default:
                    return word;
            }
        }

        /** ASCII, like every kernel's events. */
        static byte[] bytes(Object value) {
            StringBuilder out = new StringBuilder();
            write(out, value);
            return out.toString().getBytes(StandardCharsets.US_ASCII);
        }

        private static void write(StringBuilder out, Object value) {
            if (value instanceof Map) {
                String before = "{";
                for (Map.Entry<?, ?> entry : ((Map<?, ?>) value).entrySet()) {
                    out.append(before);
                    write(out, entry.getKey());
                    out.append(':');
                    write(out, entry.getValue());
                    before = ",";
                }
                out.append(before.equals("{") ? "{}" : "}");
            } else if (value instanceof List) {
                String before = "[";
                for (Object one : (List<?>) value) {
                    out.append(before);
                    write(out, one);
                    before = ",";
                }
                out.append(before.equals("[") ? "[]" : "]");
            } else if (value instanceof String) {
                quote(out, (String) value);
            } else {
                out.append(value);
            }
        }

        private static void quote(StringBuilder out, String text) {
            out.append('"');
            for (int i = 0; i < text.length(); i++) {
                char c = text.charAt(i);
                if (c == '"' || c == '\\') {
                    out.append('\\').append(c);
                } else if (c < ' ' || c > '~') {
                    out.append("\\u").append("0123456789abcdef".charAt(c >> 12)).append("0123456789abcdef".charAt(c >> 8 & 15))
                            .append("0123456789abcdef".charAt(c >> 4 & 15)).append("0123456789abcdef".charAt(c & 15));
                } else {
                    out.append(c);
                }
            }
            out.append('"');
        }
    }
}
