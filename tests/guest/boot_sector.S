# A guest of 512 bytes: it boots from the first sector of an IDE disk in milliseconds and then keeps memory, disk, clock
# and serial port busy in a way that a test can check from outside.
#
#   physical memory                       what is there
#   0x0000_6000                           the counter (u32, little endian), one step per turn of the loop
#   0x0010_0000 .. 0x0110_0000 (16 MiB)   the pattern: the dword at address A is (A * PRIME) ^ SEED; never written again
#   0x0110_0000 .. 0x0120_0000 (1 MiB)    the track: each turn dirties one of 256 pages with the counter
#
# Each turn checks one page of the pattern; a difference prints "BROKEN". A hundred times a second, by the timer chip, it
# writes the counter into disk sector 1 + (counter mod 64) and then prints it as eight hex digits. So a number that was
# printed is on the disk, and the highest number on the disk is at most one line ahead of the serial port.
#
# The timer is read by polling the interrupt controller: no interrupt handlers, and the same pace on every accelerator.

        .set    COUNTER,        0x6000          # also the start of the buffer that goes to the disk
        .set    PATTERN_START,  0x100000
        .set    PATTERN_END,    0x1100000
        .set    PAGE,           4096
        .set    PRIME,          0x9e3779b1
        .set    SEED,           0x5eed5eed
        .set    TIMER_DIVISOR,  11932           # 1193182 Hz / 11932 = 100 Hz

        .set    PIC_COMMAND,    0x20
        .set    PIC_MASK,       0x21
        .set    TIMER_CHANNEL0, 0x40
        .set    TIMER_COMMAND,  0x43
        .set    FAST_A20,       0x92
        .set    ATA_DATA,       0x1f0
        .set    ATA_COUNT,      0x1f2           # then 0x1f3..0x1f5 LBA, 0x1f6 drive, 0x1f7 command and status
        .set    SERIAL_DATA,    0x3f8
        .set    SERIAL_STATUS,  0x3fd

        .intel_syntax noprefix
        .code16
        .globl  _start
_start:
        cli
        xor     ax, ax
        mov     ds, ax
        in      al, FAST_A20
        or      al, 2
        out     FAST_A20, al
        lgdt    [gdt_pointer]
        mov     eax, cr0
        or      al, 1
        mov     cr0, eax
        ljmp    0x08, offset protected_mode

        .code32
protected_mode:
        mov     ax, 0x10
        mov     ds, ax
        mov     es, ax
        mov     ss, ax
        mov     esp, 0x7c00
        cld

        mov     edi, PATTERN_START
fill:
        imul    eax, edi, PRIME
        xor     eax, SEED
        stosd
        cmp     edi, PATTERN_END
        jb      fill

        mov     al, 0x34                        # channel 0, low then high byte, rate generator
        out     TIMER_COMMAND, al
        mov     al, TIMER_DIVISOR & 0xff
        out     TIMER_CHANNEL0, al
        mov     al, TIMER_DIVISOR >> 8
        out     TIMER_CHANNEL0, al
        mov     al, 0xfe                        # only the timer's line
        out     PIC_MASK, al

        mov     dword ptr [COUNTER], 0
        mov     ebp, PATTERN_START              # the next page to check
        mov     esi, offset ready
        call    print

turn:
        inc     dword ptr [COUNTER]
        mov     eax, [COUNTER]
        movzx   ebx, al
        shl     ebx, 12
        mov     [ebx + PATTERN_END], eax

        mov     esi, ebp
        mov     ecx, PAGE / 4
check:
        imul    edx, esi, PRIME
        xor     edx, SEED
        lodsd
        cmp     eax, edx
        loope   check
        je      intact
        mov     esi, offset broken
        call    print
intact:
        add     ebp, PAGE
        cmp     ebp, PATTERN_END
        jb      poll
        mov     ebp, PATTERN_START

poll:
        mov     al, 0x0c                        # the next read acknowledges the highest pending line
        out     PIC_COMMAND, al
        in      al, PIC_COMMAND
        test    al, al
        jns     turn
        mov     al, 0x20                        # end of interrupt
        out     PIC_COMMAND, al
        call    write_counter
        call    print_counter
        jmp     turn

write_counter:
        mov     edx, ATA_COUNT
        mov     al, 1
        out     dx, al
        inc     edx
        mov     al, [COUNTER]
        and     al, 63
        inc     al
        out     dx, al
        xor     eax, eax
        inc     edx
        out     dx, al
        inc     edx
        out     dx, al
        inc     edx
        mov     al, 0xe0                        # first drive, by LBA
        out     dx, al
        inc     edx
        mov     al, 0x30                        # write sectors
        out     dx, al
wait_for_request:
        in      al, dx
        and     al, 0x88                        # busy, data request
        cmp     al, 0x08
        jne     wait_for_request
        push    edx
        mov     edx, ATA_DATA
        mov     esi, COUNTER
        mov     ecx, 256
        rep     outsw
        pop     edx
wait_for_disk:
        in      al, dx
        test    al, 0x80
        jnz     wait_for_disk
        ret

print_counter:
        mov     ebx, [COUNTER]
        mov     ecx, 8
digit:
        rol     ebx, 4
        mov     al, bl
        and     al, 0x0f
        cmp     al, 10
        sbb     al, 0x69                        # with das: 0..15 becomes '0'..'9', 'A'..'F'
        das
        call    put
        loop    digit
        mov     al, '\n'
put:
        push    eax
        mov     edx, SERIAL_STATUS
wait_for_serial:
        in      al, dx
        test    al, 0x20
        jz      wait_for_serial
        pop     eax
        mov     edx, SERIAL_DATA
        out     dx, al
        ret

print:
        lodsb
        test    al, al
        jz      printed
        call    put
        jmp     print
printed:
        ret

ready:  .asciz  "ready\n"
broken: .asciz  "BROKEN\n"

        .balign 8
gdt:
        .quad   0
        .quad   0x00cf9a000000ffff              # code: flat 4 GiB
        .quad   0x00cf92000000ffff              # data: flat 4 GiB
gdt_pointer:
        .word   gdt_pointer - gdt - 1
        .long   gdt

        .org    510
        .word   0xaa55
