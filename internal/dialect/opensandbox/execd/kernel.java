import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.DataInputStream;
import java.io.OutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Locale;
import java.util.concurrent.LinkedBlockingQueue;
import jdk.jshell.Diag;
import jdk.jshell.EvalException;
import jdk.jshell.JShell;
import jdk.jshell.Snippet;
import jdk.jshell.SnippetEvent;
import jdk.jshell.SourceCodeAnalysis.CompletionInfo;

/**
 * A kernel of Java for images that have a JDK. Cells come on standard input: a length of four bytes and the code; a length
 * of zero interrupts. Everything that is said goes to standard output as frames: a letter, a length, the bytes. O and E
 * are output, R is the value of the last expression, X an error (its name, a newline, its text), D says that the cell is over.
 */
class Kernel {
    private static final OutputStream RAW = new FileOutputStream(FileDescriptor.out);
    private static final LinkedBlockingQueue<String> CELLS = new LinkedBlockingQueue<>();
    private static final int MOST_OUTPUT = 64 << 10; // bytes of one frame
    private static final int MOST_TEXT = 256 << 10; // characters of a value or an error, which no frame may exceed
    private static JShell shell;
    private static int waiting; // cells that have come and are not over, under the class's lock
    private static volatile boolean running;
    private static volatile boolean interrupted;

    static synchronized void frame(char kind, byte[] bytes, int from, int length) throws IOException {
        byte[] head = {(byte) kind, (byte) (length >>> 24), (byte) (length >>> 16), (byte) (length >>> 8), (byte) length};
        RAW.write(head);
        RAW.write(bytes, from, length);
        RAW.flush();
    }

    static void frame(char kind, String text) throws IOException {
        if (text.length() > MOST_TEXT) {
            text = text.substring(0, MOST_TEXT) + "… (the rest is left out: print what is so long)";
        }
        byte[] bytes = text.getBytes(StandardCharsets.UTF_8);
        frame(kind, bytes, 0, bytes.length);
    }

    /** What code prints. */
    static class Framed extends OutputStream {
        private final char kind;

        Framed(char kind) {
            this.kind = kind;
        }

        @Override
        public void write(int b) throws IOException {
            frame(kind, new byte[] {(byte) b}, 0, 1);
        }

        @Override
        public void write(byte[] bytes, int from, int length) throws IOException {
            for (int end = from + length; from < end; from += MOST_OUTPUT) {
                frame(kind, bytes, from, Math.min(MOST_OUTPUT, end - from));
            }
        }
    }

    public static void main(String[] args) throws Exception {
        System.setOut(new PrintStream(new Framed('O'), true, "UTF-8"));
        System.setErr(new PrintStream(new Framed('E'), true, "UTF-8"));
        shell = JShell.builder().executionEngine("local").build();
        for (String name : List.of("java.io", "java.math", "java.net", "java.nio.file", "java.util", "java.util.concurrent",
                "java.util.function", "java.util.regex", "java.util.stream")) {
            shell.eval("import " + name + ".*;");
        }
        for (Runnable task : List.<Runnable>of(Kernel::read, Kernel::insist)) {
            Thread thread = new Thread(task);
            thread.setDaemon(true);
            thread.start();
        }
        while (true) {
            String cell = CELLS.take();
            running = true;
            run(cell);
            over();
            frame('D', "");
        }
    }

    private static void read() {
        try (DataInputStream in = new DataInputStream(System.in)) {
            while (true) {
                int length = in.readInt();
                if (length == 0) {
                    interrupt();
                    continue;
                }
                come(new String(in.readNBytes(length), StandardCharsets.UTF_8));
            }
        } catch (IOException end) {
            System.exit(0); // nobody asks any more
        }
    }

    private static synchronized void come(String cell) {
        waiting++;
        CELLS.add(cell);
    }

    /** An interrupt is for the cell that came before it, even if that has not begun: a kernel takes seconds to start. */
    private static synchronized void interrupt() {
        interrupted = waiting > 0;
    }

    private static synchronized void over() {
        waiting--;
        running = false;
        interrupted = false;
    }

    /** Stops an interrupted cell, again and again: once may come between two of its statements. */
    private static void insist() {
        try {
            while (true) {
                stop();
                Thread.sleep(20);
            }
        } catch (InterruptedException end) {
            Thread.currentThread().interrupt();
        }
    }

    /** Under the lock, so that it hits neither the next cell nor a frame that is half written. */
    private static synchronized void stop() {
        if (interrupted && running) {
            shell.stop();
        }
    }

    private static void run(String rest) throws IOException {
        String value = null;
        while (!rest.isBlank() && !interrupted) {
            CompletionInfo next = shell.sourceCodeAnalysis().analyzeCompletion(rest);
            String source = next.completeness().isComplete() ? next.source() : rest;
            rest = next.completeness().isComplete() ? next.remaining() : "";
            for (SnippetEvent e : shell.eval(source)) {
                if (e.causeSnippet() != null) {
                    continue; // something of before that changed with it
                }
                if (failed(e)) {
                    return;
                }
                value = expression(e.snippet()) ? e.value() : null;
            }
        }
        if (value != null && !value.isEmpty()) {
            frame('R', value);
        }
    }

    private static boolean expression(Snippet s) {
        return s.kind() == Snippet.Kind.EXPRESSION || s.subKind() == Snippet.SubKind.TEMP_VAR_EXPRESSION_SUBKIND;
    }

    private static boolean failed(SnippetEvent e) throws IOException {
        if (e.status() == Snippet.Status.REJECTED) {
            StringBuilder text = new StringBuilder();
            shell.diagnostics(e.snippet()).filter(Diag::isError).forEach(d -> text.append(d.getMessage(Locale.ROOT)).append('\n'));
            frame('X', "CompilationException\n" + text.toString().strip());
            return true;
        }
        if (e.exception() == null) {
            return false;
        }
        // The name is the one that programs know from Jupyter's kernel of Java; what was thrown is in the text.
        String text = e.exception().getMessage();
        if (e.exception() instanceof EvalException) {
            String thrown = ((EvalException) e.exception()).getExceptionClassName();
            text = text == null ? thrown : thrown + ": " + text;
        }
        frame('X', e.exception().getClass().getSimpleName() + "\n" + (text == null ? "" : text));
        return true;
    }
}
